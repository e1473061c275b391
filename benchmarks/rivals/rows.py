"""Result files of the rivals, and the tables made of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.case import MEASURED, RIVALS, Case
from megatrain.base.units import gib

_ORDER = [each.name for each in RIVALS]
_HEAD = (
    "| | semantics | rows at once | seconds a step (spread) | model TFLOPS | device | host |",
    "|---|---|---|---|---|---|---|",
)


def write(row: dict[str, Any], folder: Path) -> Path:
    """Keep a row, in place of an older one of the same run, case, machine and rival."""
    case = Case(**row["case"])
    file = folder / f"rivals-{case.name}-{_machine(row)}-{_slug(row['run'])}-{row['rival']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    return file


def tables(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of each case's runs, in the rivals' order; large models and steps, new runs first.

    Rows of two runs are in no table together: machines differ more than programs do.
    """
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("rivals-*.json")):
        row = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault((Case(**row["case"]).name, _machine(row), row["run"]), []).append(row)
    newest_first = sorted(found.values(), key=lambda rows: rows[0]["time"], reverse=True)
    return sorted((sorted(rows, key=_place) for rows in newest_first), key=_size)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown; a row without a result says why."""
    return [*_HEAD, *(_line(row) for row in sorted(rows, key=_place))]


def caption(rows: Sequence[dict[str, Any]]) -> str:
    """Which work on which machine, in words."""
    row = rows[0]
    case, machine = Case(**row["case"]), row.get("environment")
    words = f"Qwen2.5-{case.shape.upper()}, {case.sequences} x {case.sequence_length} tokens a step"
    if case.lora_r:
        words += f", LoRA of rank {case.lora_r}"
    if case.device_memory_bytes:
        words += f", {gib(case.device_memory_bytes)} of device memory"
    return words + (f"; {_where(machine)}, commit {row['commit'][:8]}" if machine else "")


def commands(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What measures the table again; a run may have been made in parts."""
    return sorted({row["command"] for row in rows})


def _place(row: dict[str, Any]) -> int:
    return _ORDER.index(row["rival"])


def _size(table: list[dict[str, Any]]) -> tuple[int, int, int]:
    case = Case(**table[0]["case"])
    parameters = max((row.get("parameters", 0) for row in table), default=0)
    return -parameters, -case.tokens_per_step, -(case.device_memory_bytes or 10**15)


def _semantics(row: dict[str, Any]) -> str:
    if row["rival"] == "resident":
        return "bf16 weights, no update"
    if row["case"].get("lora_r"):
        return "bf16 base, fp32 adapter, clipped"
    return "fp32 masters and moments, clipped"


def _line(row: dict[str, Any]) -> str:
    own = "**" if row["rival"] == _ORDER[0] else ""
    rows = row["micro_batch"] or "as it chooses"
    if row["status"] != MEASURED:
        return f"| {own}{row['title']}{own} | | {rows} | {row['status']} | | | |"
    spread = f"{row['min_seconds']:.2f} to {row['max_seconds']:.2f}"
    device = row["device_peak_bytes"]
    return (
        f"| {own}{row['title']}{own} | {_semantics(row)} | {rows} "
        f"| {row['median_seconds']:.2f} s ({spread}) | {own}{row['model_tflops']:.0f}{own} "
        f"| {gib(device) if device else ''} | {gib(row['host_peak_bytes'])} |"
    )


def _where(machine: dict[str, Any]) -> str:
    name = machine["gpu"]["name"] if machine["gpu"] else "CPU"
    return f"{name}, {machine['usable_cores']} cores"


def _machine(row: dict[str, Any]) -> str:
    """`h200`: the part of a file name that says where."""
    gpu = (row.get("environment") or {}).get("gpu")
    if gpu is None:
        return "cpu"
    return _slug(gpu["name"].lower().replace("nvidia", ""))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
