"""`python -m benchmarks.tables`: tables of README and docs/benchmarks.md, from the result files.

README gets what fits where and the fullest run of rivals; docs/benchmarks.md gets all steps, the
other runs of rivals and the commands that measure all of them.

With `--check` nothing is written; the exit status says whether both are in step.
"""

import json
import sys
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.long_context import attention_tflops
from benchmarks.rivals import rows as rival_rows
from benchmarks.rivals.case import MEASURED
from benchmarks.score_tables import lines as scores
from benchmarks.score_tables import pictures
from benchmarks.step import StepCase
from megatrain.placement import renamed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OPTIONS: dict[str, Any] = {
    "precision": "bf16",
    **{field.name: field.default for field in fields(StepCase) if field.default is not MISSING},
}
"""Options of `benchmarks.step` that a case need not have, and what they are then."""
OWN = {"120b": "Qwen2.5's proportions at "}
"""Shapes that Qwen2.5 does not have."""
LONG = 16384
"""Tokens of rows whose attention is counted, too."""

HEAD = [
    "| shape, step | machine | seconds a step (spread) | model TFLOPS | device | host |",
    "|---|---|---|---|---|---|",
]


def steps() -> list[dict[str, Any]]:
    """The results of training steps, largest model first."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("step-*.json"))]
    return sorted(results, key=lambda r: (-r["parameters"], -r["tokens_per_step"]))


def rows() -> list[str]:
    """A line for each result."""
    return [_row(result) for result in steps()]


def what_fits() -> list[str]:
    """A line for each size of host memory, a column for each GPU."""
    cells = json.loads((RESULTS / "what-fits.json").read_text())["cells"]
    gpus = list({cell["gpu"]: cell["cores"] for cell in cells}.items())
    lines = ["| host memory | " + " | ".join(f"{g}, {cores} cores" for g, cores in gpus) + " |"]
    lines += ["|---" * (len(gpus) + 1) + "|"]
    for host_gib in sorted({cell["host_gib"] for cell in cells}):
        line = [f"{host_gib} GiB"]
        for gpu, _ in gpus:
            found = [c for c in cells if (c["gpu"], c["host_gib"]) == (gpu, host_gib)]
            said = [
                f"{'LoRA ' * (c['lora_r'] > 0)}{c['shape'].upper()}, {c['tokens_per_second']:,.0f}"
                for c in sorted(found, key=lambda c: c["lora_r"])
            ]
            line.append("<br>".join(said) or "-")
        lines.append(f"| {' | '.join(line)} |")
    return lines


def _row(result: dict[str, Any]) -> str:
    case, memory = result["case"], result["memory"]
    gpu = result["environment"]["gpu"]["name"] if result["environment"]["gpu"] else "CPU"
    spread = f"{result['min_seconds']:.2f} to {result['max_seconds']:.2f}"
    if result["count"] == 1:
        spread = "a single step"
    long = case["sequence_length"] >= LONG
    counted = f", {attention_tflops(result):.0f} with attention" if long else ""
    limit = f", at most {case['device_memory']}" if case.get("device_memory") else ""
    limit += "" if case["max_grad_norm"] else ", no clipping"
    optimizer = case.get("optimizer", "adamw")
    limit += "" if optimizer == "adamw" else f", {optimizer.capitalize()}"
    states = case.get("states", "fp32")
    limit += "" if states == "fp32" else f", {states} states"
    limit += "" if case["precision"] == "bf16" else f", {case['precision']}"
    master = case.get("master", 32)
    limit += "" if master == 32 else f", {master}-bit master"
    limit += f", LoRA of rank {case['lora_r']}" if case.get("lora_r") else ""
    limit += f", {case['base']} base" if case.get("base", "bf16") != "bf16" else ""
    documents = case.get("documents")
    limit += f", {documents} documents a row" if documents else ""
    by_hand = ", placed by hand" if case["placement"] else ""
    model = f"{OWN.get(case['shape'], 'Qwen2.5-')}{case['shape'].upper()}"
    return (
        f"| {model}, {case['sequences']} x {case['sequence_length']} by {case['micro_batch']}"
        f"{limit}{by_hand} "
        f"| {gpu}, {result['environment']['usable_cores']} cores "
        f"| {result['median_seconds']:.2f} s ({spread}) "
        f"| **{result['model_tflops']:.0f}**{counted} "
        f"| {memory['device_peak_bytes'] / 2**30:.1f} GiB "
        f"| {result['host_peak_bytes'] / 2**30:.1f} GiB |"
    )


def commands() -> list[str]:
    """The commands behind the rows, then those behind the tables of rivals."""
    rivals = {each for table in rival_rows.tables(RESULTS) for each in rival_rows.commands(table)}
    return [*sorted({command(result) for result in steps()}), *sorted(rivals)]


def command(result: dict[str, Any]) -> str:
    """The command that measures a step again."""
    case = result["case"]
    if case["sequence_length"] >= LONG and case["placement"]:
        resident = len(case["placement"].get("resident", ()))
        rests = f" --resident {resident}" if resident else ""
        return f"python -m benchmarks.long_context --shape {case['shape']}{rests} --output OUT"
    options = "" if case["max_grad_norm"] else " --max-grad-norm 0"
    for name, usual in OPTIONS.items():
        if (value := case.get(name, usual)) != usual:
            options += f" --{name.replace('_', '-')} {value}"
    chosen = "".join(
        f" --placement {_choice(k, v)}" for k, v in renamed(case["placement"] or {}).items()
    )
    return (
        f"python -m benchmarks.step --shape {case['shape']} --sequences {case['sequences']} "
        f"--sequence-length {case['sequence_length']} --micro-batch {case['micro_batch']}"
        f"{options}{chosen}"
    )


def _choice(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"'{name}=[{', '.join(value)}]'"
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def rivals() -> list[list[str]]:
    """A table for each run of rivals: most measured rows first, then the largest step."""
    tables = sorted(rival_rows.tables(RESULTS), key=_weight, reverse=True)
    return [["", f"{rival_rows.caption(each)}:", "", *rival_rows.table(each)] for each in tables]


def _weight(table: list[dict[str, Any]]) -> tuple[int, int]:
    case, statuses = table[0]["case"], [row["status"] for row in table]
    return statuses.count(MEASURED), int(case["sequences"] * case["sequence_length"])


def sections() -> dict[tuple[Path, str], list[str]]:
    """What stands between the marks of each document, by the marks' name."""
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    largest, *others = rivals()
    return {
        (readme, "fits"): what_fits(),
        (readme, "results"): largest[1:],
        (page, "steps"): [*HEAD, *rows()],
        (ROOT / "docs" / "results.md", "scores"): scores(),
        (ROOT / "docs" / "results.md", "pictures"): pictures(),
        (page, "results"): ["```", *commands(), "```", *chain(*others)],
    }


def main() -> int:
    """Write the sections, or with `--check` compare them."""
    differs = False
    for (document, name), lines in sections().items():
        begin, end = (f"<!-- {name}:{which} -->" for which in ("begin", "end"))
        text = document.read_text(encoding="utf-8")
        before, after = text.split(begin)[0], text.split(end)[1]
        wanted = before + "\n".join([begin, "", *lines, "", end]) + after
        differs |= wanted != text
        if "--check" not in sys.argv:
            document.write_text(wanted, encoding="utf-8")
    return int(differs and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
