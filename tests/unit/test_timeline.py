"""Timelines: what is noted of a step, and what is made of it."""

import json

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, Engine
from megatrain.errors import RunFailed
from megatrain.telemetry.timeline import (
    Span,
    breakdown,
    chrome_trace,
    critical_path,
    read_trace,
)
from megatrain.train.steps import RunTimeline

SPANS = [
    Span("compute", "layer 0", 0.0, 1.0),
    Span("copy in", "layer 1 weights -> slot 1", 0.5, 2.5, ("version due",)),
    Span("compute", "layer 1", 2.5, 3.5, ("weights arrived",)),
    Span("compute", "layer 1 backward", 3.6, 5.0),
    Span("update", "update layer 0", 4.0, 6.0),
]


def test_idle_time_is_put_down_to_what_was_waited_for():
    found = breakdown(SPANS, "compute")
    assert found.seconds == 6.0
    assert found.busy == pytest.approx({"compute": 3.4, "copy in": 2.0, "update": 2.0})
    assert found.idle == pytest.approx({"weights arrived": 1.5, "launch": 0.1, "end of step": 1.0})
    assert found.work["compute", "layer"] == pytest.approx(2.0)  # numbers are left out of names
    assert found.rows()[0] == ("compute: layer", pytest.approx(2.0))


def test_the_critical_path_leads_from_the_end_to_the_beginning():
    """Computing takes most of the time, and waits for updates most of it."""
    spans = [
        Span("update", "update layer 0", 0.0, 2.0),
        Span("compute", "layer 1", 0.1, 1.9),
        Span("compute", "layer 0", 2.0, 3.0),
        Span("update", "update layer 1", 2.5, 2.9),
        Span("reduce", "sums", 3.1, 4.0),
        Span("copy out", "gradient", 3.5, 3.6),
    ]
    path = critical_path(spans)
    assert path == pytest.approx({"update": 2.0, "compute": 1.0, "reduce": 0.9, "launches": 0.1})
    assert breakdown(spans, "compute").busy["compute"] > path["update"] * 1.2


def test_a_trace_is_read_as_it_was_written():
    spans = [*SPANS, Span("copy out", "gradient", 6.0, 7.0, ("a", "b"), num_bytes=5)]
    read = read_trace(json.loads(json.dumps(chrome_trace(spans))))
    assert [(s.stream, s.name, s.after, s.num_bytes) for s in read] == [
        (s.stream, s.name, s.after, s.num_bytes) for s in spans
    ]
    times = [(s.start, s.end) for s in spans]
    assert [(s.start, s.end) for s in read] == [pytest.approx(pair) for pair in times]


def _tiny_engine(width=8):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    return Engine(config, optimizer=AdamW(), device="cpu", precision="fp32")


IDS = torch.ones(2, 4).long()
BATCH = [{"input_ids": IDS, "labels": IDS}]


def test_bytes_of_copies_and_updates_are_noted():
    with _tiny_engine(64) as engine:
        with engine.recording() as spans:
            engine.step(BATCH)
        layer = sum(p.numel() for n, p in engine.named_masters() if ".layers.0." in n)
    by_name = {span.name: span for span in spans}
    assert by_name["update layer 0"].num_bytes == pytest.approx(28 * layer, rel=0.05)
    copy_in = next(s for s in spans if s.stream == "copy in" and "layer 0 weights" in s.name)
    assert copy_in.num_bytes == pytest.approx(4 * layer, rel=0.05)


@pytest.mark.parametrize(("steps", "kept"), [(1, 1), (2, 2), (8, 6)])
def test_a_run_keeps_the_timeline_of_one_early_step(tmp_path, steps, kept):
    with _tiny_engine() as engine:
        timeline = RunTimeline(engine.recording, tmp_path, steps)
        for number in range(1, steps + 1):
            assert timeline.step(number, lambda: engine.step(BATCH)).tokens == 8
            assert (tmp_path / "timeline.json").exists() == (number >= kept)
    timeline.draw()
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["otherData"]["step"] == kept
    assert [span.name for span in read_trace(trace)].count("layer 2 backward") == 1
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def _refuse():
    raise RunFailed("not finite")


@pytest.mark.parametrize("refused", [5, 6])
def test_a_step_that_is_left_out_is_not_on_the_timeline(tmp_path, refused):
    with _tiny_engine() as engine:
        timeline = RunTimeline(engine.recording, tmp_path, 9)
        for number in range(1, 10):
            if number == refused:
                with pytest.raises(RunFailed):
                    timeline.step(number, _refuse)
            else:
                timeline.step(number, lambda: engine.step(BATCH))
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["otherData"]["step"] == refused + 2
    names = [span.name for span in read_trace(trace)]
    assert names.count("layer 0") == names.count("layer 0 backward") == 1
