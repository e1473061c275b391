"""`python -m benchmarks.tables`: the README's tables, from the result files.

First MegaTrain's own steps, then one table for each case in which rivals ran beside it.

With `--check` nothing is written; the exit status says whether the README is in step.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.rivals import rows as rival_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def rows() -> list[str]:
    """A line of the table for each result of the training step, largest model first."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("step-*.json"))]
    results.sort(key=lambda r: (-r["parameters"], -r["tokens_per_step"]))
    return [_row(result) for result in results]


def _row(result: dict[str, Any]) -> str:
    case, memory = result["case"], result["memory"]
    gpu = result["environment"]["gpu"]["name"] if result["environment"]["gpu"] else "CPU"
    spread = f"{result['min_seconds']:.2f} to {result['max_seconds']:.2f}"
    limit = f", at most {case['device_memory']}" if case.get("device_memory") else ""
    by_hand = ", placed by hand" if case["placement"] else ""
    return (
        f"| Qwen2.5-{case['shape'].upper()}, {case['sequences']} x {case['sequence_length']}"
        f"{limit}{by_hand} "
        f"| {gpu}, {result['environment']['cores']} cores "
        f"| {result['median_seconds']:.2f} s ({spread}) "
        f"| **{result['model_tflops']:.0f}** "
        f"| {memory['device_peak_bytes'] / 2**30:.1f} GiB "
        f"| {result['host_peak_bytes'] / 2**30:.1f} GiB |"
    )


def commands() -> list[str]:
    """The command behind each row."""
    lines = []
    for file in sorted(RESULTS.glob("step-*.json")):
        case = json.loads(file.read_text())["case"]
        limit = f" --device-memory {case['device_memory']}" if case.get("device_memory") else ""
        chosen = "".join(
            f" --placement {k}={_plain(v)}" for k, v in (case["placement"] or {}).items()
        )
        lines.append(
            f"megatrain bench step --shape {case['shape']} --sequences {case['sequences']} "
            f"--sequence-length {case['sequence_length']} --micro-batch {case['micro_batch']}"
            f"{limit}{chosen}"
        )
    return lines


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def rivals() -> list[str]:
    """A table for each case that rivals ran, each with the command behind it."""
    lines = []
    for table in rival_rows.newest(RESULTS):
        lines += ["", f"{rival_rows.caption(table)}:", "", *rival_rows.table(table)]
        lines += ["", "```", *rival_rows.commands(table), "```"]
    return lines


def section() -> str:
    """Everything between the README's two marks."""
    head = [
        "| shape, step | machine | seconds a step (spread) | model TFLOPS | device | host |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [BEGIN, "", *head, *rows(), "", "```", *commands(), "```", *rivals(), "", END],
    )


def main() -> int:
    """Write the section, or with `--check` compare it."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    wanted = before + section() + after
    if "--check" in sys.argv:
        return int(wanted != text)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
