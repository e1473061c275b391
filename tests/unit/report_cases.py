"""A run's folder as a page is made from, and a parser that holds pages to being well formed."""

import json
from html.parser import HTMLParser
from pathlib import Path

from megatrain.base.units import GIB
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

    EMPTY = ("meta", "img")

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
