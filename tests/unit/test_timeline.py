"""Timelines: what is noted of a step, and what is made of it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, Engine
from megatrain.telemetry.picture import draw
from megatrain.telemetry.timeline import Span, breakdown, chrome_trace

SPANS = [
    Span("compute", "layer 0", 0.0, 1.0),
    Span("copy in", "layer 1 weights -> slot 1", 0.5, 2.5, ("version due",)),
    Span("compute", "layer 1", 2.5, 3.5, ("weights arrived",)),
    Span("compute", "layer 1 backward", 3.6, 5.0),
    Span("update", "update layer 0", 4.0, 6.0),
]


def test_idle_time_is_put_down_to_what_was_waited_for() -> None:
    found = breakdown(SPANS, "compute")
    assert found.seconds == 6.0
    assert found.busy == pytest.approx({"compute": 3.4, "copy in": 2.0, "update": 2.0})
    assert found.idle == pytest.approx({"weights arrived": 1.5, "launch": 0.1, "end of step": 1.0})
    assert found.work["compute", "layer"] == pytest.approx(2.0)  # numbers are left out of names
    assert found.lines()[0].endswith("compute: layer")


def test_a_trace_opens_in_perfetto() -> None:
    events = json.loads(json.dumps(chrome_trace(SPANS)))["traceEvents"]
    whole = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in whole] == [span.name for span in SPANS]
    assert whole[1]["ts"] == pytest.approx(5e5) and whole[1]["dur"] == pytest.approx(2e6)
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert [e["tid"] for e in whole] == [lanes[span.stream] for span in SPANS]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(SPANS, tmp_path / "step.png", "a step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_every_visit_of_a_step_is_noted() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    ids = torch.ones(2, 4).long()
    with Engine(config, optimizer=AdamW(), device="cpu") as engine:
        with engine.recording() as spans:
            engine.step([{"input_ids": ids, "labels": ids}])
        noted = len(spans)
        engine.step([{"input_ids": ids, "labels": ids}])
    names = [span.name for span in spans]
    for visit in range(3):
        assert {f"layer {visit}", f"layer {visit} backward", f"update layer {visit}"} <= set(names)
    assert len(spans) == noted  # nothing is noted outside the block
    assert all(span.end >= span.start for span in spans)
