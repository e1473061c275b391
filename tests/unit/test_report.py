"""The page of a run: what it shows is right, and what is missing or damaged costs only itself."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatrain.base.units import GIB
from megatrain.report import write_report
from megatrain.report.page import charts, collect
from megatrain.telemetry.timeline import Span, chrome_trace

STEP_TOKENS = 1000
PARAMETERS = 10**9

# One second: 0.6 computing, 0.3 waiting for weights, 0.1 at the end.
SPANS = [
    Span("compute", "layer 0", 0.0, 0.2),
    Span("copy in", "layer 1 weights -> slot 1", 0.1, 0.5, ("slot free",), 2 * 10**9),
    Span("compute", "layer 1", 0.5, 0.7, ("weights arrived",)),
    Span("compute", "layer 1 backward", 0.7, 0.9),
    Span("copy out", "outgoing 0 -> layer 1 gradient", 0.8, 1.0, ("gradient ready",), 10**9),
    Span("update", "update layer 0", 0.0, 0.4, ("gradient landed",), 26 * 10**9),
]

ENVIRONMENT = {
    "python": "3.11.0",
    "packages": {"torch": "2.11.0", "datasets": None},
    "cpu": "Xeon",
    "usable_cores": 16,
    "host_limit_bytes": 125 * GIB,
    "device": "cuda:0",
    "gpu": {"name": "NVIDIA H200", "memory_bytes": 140 * GIB, "driver": "580"},
    "parameters": PARAMETERS,
    "placement": {"slots": 3, "resident": ["embedding"], "prefetch": None},
    "commit": "c0ffee",
}


def record(step: int, **changes) -> dict:
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens": STEP_TOKENS,
        "seconds": 1.0,
        "tokens_per_second": float(STEP_TOKENS),
        "model_tflops": 400.0,
        "mfu": 0.4,
        "device_peak_bytes": 3 * GIB,
        "host_bytes": 14 * GIB,
    } | changes


def write_run(folder: Path, steps: int = 8, total: int = 8) -> Path:
    """A run of `steps` of `total` steps with everything that a run leaves."""
    folder.mkdir()
    lines = [record(step) for step in range(1, steps + 1)]
    lines.append({"step": steps, "eval_loss": 2.5, "eval_seconds": 0.5})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    config = f"model: {{path: my/model}}\ntraining: {{steps: {total}}}\n"
    (folder / "config.yaml").write_text(config + "engine: {precision: bf16}\n")
    trace = chrome_trace(SPANS) | {"otherData": {"step": 6}}
    (folder / "timeline.json").write_text(json.dumps(trace))
    if steps == total:
        (folder / "model").mkdir()
    return folder


class Page(HTMLParser):
    """Parses a page; asserts that its tags are closed in order, and keeps what tests look at."""

    EMPTY = ("meta", "link", "input", "br", "hr", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open and self.open[-1] == tag, (tag, self.open)
            self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def named(self, tag: str, cls: str = "") -> list[dict[str, str | None]]:
        """The attributes of every `tag` that has the class."""
        found = [attributes for name, attributes in self.tags if name == tag]
        return [a for a in found if not cls or cls in str(a.get("class", "")).split()]


def made(run):
    return Page(write_report(run, run / "page.html").read_text())


def test_a_page_is_well_formed_and_needs_nothing_else_and_says_what_a_run_was(tmp_path):
    written = write_report(write_run(tmp_path / "run"))
    assert written == tmp_path / "run" / "report.html"
    html = written.read_text()
    found = Page(html)
    assert not re.search(r"https?://|url\(|@import|href=", html)
    assert "default-src 'none'" in html
    assert found.named("html")[0]["lang"] == "en"
    assert len(found.named("img")) == 2
    for picture in found.named("img"):
        assert base64.b64decode(picture["src"].partition(",")[2]).startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for part in (
        *("run", "Finished: 8 of 8 steps.", "my/model", "1,000,000,000", "c0ffee", "torch: 2.11.0"),
        *("Loss 1.25 Loss of the evaluation 2.5", "Steps 8 Tokens 8,000", "Time in steps"),
        *("Model TFLOPS, median 400 MFU, median 0.4", "3.0 GiB", "14.0 GiB"),
        *("slots: 3", "name: NVIDIA H200", "usable_cores: 16", "Timeline of step 6"),
        *("idle: weights arrived 0.3000 30.0%", "idle: end of step 0.1000 10.0%"),
        "layer 0.4000 40.0%",
    ):
        assert part in found.text, part
    assert "Missing" not in found.text


@pytest.mark.parametrize(
    "damaged",
    [
        {"metrics.jsonl": b"\xff\x00[{]" * 9, "config.yaml": b"a: &x [1]\nb: [*x, *x]\n"},
        {"environment.json": None, "timeline.json": b'{"traceEvents": [{"ph": "X"}]}'},
        {"timeline.json": b"[" * 100_000},
    ],
)
def test_a_damaged_file_costs_only_what_it_says(tmp_path, damaged):
    run = write_run(tmp_path / "run")
    for name, content in damaged.items():
        (run / name).unlink()
        if content is not None:
            (run / name).write_bytes(content)
    found = made(run)
    assert all(name in found.text for name in damaged)
    assert bool(found.named("figure", "timeline")) == ("timeline.json" not in damaged)
    if "metrics.jsonl" not in damaged:
        assert len(found.named("figure", "charts")) == 1
        assert "Host memory, at peak 14.0 GiB" in found.text


def test_a_run_that_goes_on_and_one_that_failed(tmp_path):
    run = write_run(tmp_path / "run", steps=5, total=100)
    (run / "timeline.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    text = made(run).text
    assert "Still going, or ended before its model was written: 5 of 100 steps." in text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 6, "failed": "the loss is nan", "rows": "7"}\n')
    assert "Failed after 5 of 100 steps: the loss is nan" in made(run).text


def test_evaluation_sets_and_accuracy_are_drawn():
    line = {"step": 8, "eval_loss": 2.0, "eval_code_loss": 1.5, "eval_accuracy": 0.625}
    drawn = {chart.title: chart.lines for chart in charts(collect([record(8), line]))}
    assert [line.label for line in drawn["Loss"]] == ["training", "evaluation", "evaluation, code"]
    assert [line.y.tolist() for line in drawn["Accuracy"]] == [[0.625]]


def test_what_a_resumed_run_did_twice_counts_once():
    lines = [record(s, loss=1.0) for s in range(1, 7)] + [{"step": 4, "eval_loss": 9.0}]
    lines += [{"step": 5, "skipped": "not finite", "rows": "1"}] * 2
    lines += [record(s, loss=2.0) for s in range(4, 8)] + [{"step": 4, "eval_loss": 8.0}]
    metrics = collect(lines)
    assert metrics.columns["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert metrics.columns["loss"].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert [line.y.tolist() for line in metrics.evaluated("loss")] == [[8.0]]
    failed = [record(1), {"step": 2, "failed": "the loss is nan"}]
    assert collect(failed).failed and not collect([*failed, record(2)]).failed
    assert metrics.finite("tokens").sum() == 7 * STEP_TOKENS


def test_values_that_are_no_numbers_are_gaps():
    broken = record(2, loss="NaN", lr=None, mfu=[1], grad_norm=10**400, tokens=True)
    metrics = collect([record(1), broken, {"step": "x"}, {}, {"step": None, "loss": 1}])
    assert metrics.num_steps == 2
    for name in ("loss", "lr", "mfu", "grad_norm", "tokens"):
        assert np.isnan(metrics.columns[name][1])
    assert metrics.last("loss") == 10.0


def test_names_are_text_whatever_is_in_them(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror='\"&>"
    run = write_run(tmp_path / "run")
    (run / "environment.json").write_text(
        json.dumps(ENVIRONMENT | {"cpu": evil, "placement": {evil: evil}})
    )
    (run / "config.yaml").write_text(json.dumps({"model": {"path": evil}}))
    trace = chrome_trace([Span(evil, evil, 0.0, 1.0, (evil,)), *SPANS])
    (run / "timeline.json").write_text(json.dumps(trace))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "failed": evil}) + "\n")
    found = made(run)
    assert not found.named("script") and len(found.named("img")) == 2
    assert found.text.count("alert(1)") >= 4


def test_samples_of_a_page_are_escaped_and_bounded(tmp_path):
    (run := tmp_path / "run").mkdir()
    (run / "metrics.jsonl").touch()
    evil = "<script>alert(1)</script>"
    images = ["data:image/jpeg;base64,aGE=", "https://example.org/a.png", f"data:,{evil}"]
    sample = {"place": evil, "images": images, "runs": [[evil, True], ["b" * 9000, False]]}
    (run / "samples.json").write_text(json.dumps({"samples": [sample] * 9}))
    html = write_report(run).read_text()
    assert "<script" not in html and "example.org" not in html and "b" * 1001 not in html
    assert html.count("data:image/jpeg;base64,aGE=") == 3 and "<mark>&lt;script" in html
    (run / "samples.json").write_text(json.dumps({"samples": [{"place": 1}]}))
    assert "samples.json is missing or damaged" in write_report(run).read_text()
