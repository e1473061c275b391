"""`python -m benchmarks.rivals`: the rows of one table. See the package."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.rivals import rows
from benchmarks.rivals.case import MEASURED, RIVALS, Case, Rival, Task, rival
from benchmarks.rivals.supervise import only, run_fitting
from benchmarks.step import statistics_of
from megatrain.base.json_yaml import parse_yaml
from megatrain.base.units import gib, parse_bytes
from megatrain.cli.models import SHAPES
from megatrain.telemetry.host import commit

STEPS = 5  # measured
NAMES = tuple(each.name for each in RIVALS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each rival in turn, write its row at once, print the table."""
    options = _parse(arguments)
    case = Case(
        shape=options.shape,
        layers=options.layers,
        sequences=options.sequences,
        sequence_length=options.sequence_length,
        steps=options.steps,
        device=options.device,
        device_memory_bytes=options.device_memory,
        lora_r=options.lora_r,
    )
    done = []
    with only(case.device_memory_bytes, case.device):
        for who in RIVALS:
            if who.name not in options.rivals or not who.takes_part(case):
                continue
            print(f"{who.name}: {case.name}", flush=True)
            row = row_of(who, task_of(who, case, options), options.run)
            row["command"] = command(options)
            file = rows.write(row, options.output)
            print(f"    {row['status']}: {row.get('reason', file.name)}", flush=True)
            done.append(row)
    print("\n".join(rows.table(done)))


def task_of(who: Rival, case: Case, options: argparse.Namespace) -> Task:
    """What the rival's process is told; the command line beats the tuned settings."""
    rival_options = dict(who.options)
    if who.name == "megatrain" and options.placement:
        rival_options["placement"] = dict(options.placement)
    return Task(
        case=case,
        rival=who.name,
        options=rival_options,
        warmup=who.warmup if options.warmup is None else options.warmup,
        micro_batch=dict(options.micro_batch).get(who.name, who.micro_batch(case)),
        seconds=options.limit,
    )


def row_of(who: Rival, task: Task, run: str) -> dict[str, Any]:
    """One rival's result, as it is kept."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = run_fitting(task)
    if outcome["status"] == MEASURED:
        times = outcome["step_seconds"][task.warmup :]
        size = outcome["parameters"], outcome["trained_parameters"]
        outcome |= statistics_of(times, task.case.tokens_per_step, *size)
    return {
        "benchmark": "rivals",
        "run": run,
        "time": time,
        "commit": commit(),
        "case": asdict(task.case),
        "rival": who.name,
        "title": who.title.format(version=outcome.get("version") or "").replace(" ,", ","),
        "options": task.options,
        "warmup": task.warmup,
        "limit_seconds": task.seconds,
        "tokens_per_step": task.case.tokens_per_step,
        **outcome,
    }


def command(options: argparse.Namespace) -> str:
    """What measures the whole table in the same way."""
    words = ["python -m benchmarks.rivals", f"--shape {options.shape}"]
    words += [f"--sequences {options.sequences}", f"--sequence-length {options.sequence_length}"]
    optional = {"layers": options.layers, "warmup": options.warmup}
    if options.lora_r:
        optional["lora-r"] = options.lora_r
    if options.device_memory:
        optional["device-memory"] = gib(options.device_memory).replace(" ", "")
    words += [f"--{name} {value}" for name, value in optional.items() if value is not None]
    words += [f"--steps {options.steps}"] if options.steps != STEPS else []
    words += [f"--micro-batch {name}={number or 'auto'}" for name, number in options.micro_batch]
    words += [f"--placement {name}={json.dumps(value)}" for name, value in options.placement]
    return " ".join([*words, "--output benchmarks/results"])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True, help="size of Qwen2.5")
    add("--layers", type=int, help="only so many layers")
    add("--sequences", type=int, default=96, help="rows of one optimizer step")
    add("--sequence-length", type=int, default=1024, help="tokens of a row")
    add("--steps", type=int, default=STEPS, help="measured steps")
    add("--warmup", type=int, help="steps before those, in place of each rival's own number")
    add("--lora-r", type=int, default=0, help="train LoRA of this rank alone; 0: all")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    add("--device-memory", type=_size, help="leave so much of the device free, say 12GiB")
    add("--limit", type=float, default=240.0, help="seconds for one process")
    add("--rivals", type=_names, default=NAMES, help=f"some of {','.join(NAMES)}")
    add("--micro-batch", type=_micro_batch, action="append", default=[], metavar="RIVAL=ROWS")
    add("--placement", type=_choice, action="append", default=[], metavar="NAME=VALUE")
    add("--run", default=_now(), help="rows of the same run are shown together")
    add("--output", type=Path, required=True, help="folder of the result files")
    return parser.parse_args(arguments)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")


def _size(text: str) -> int:
    return parse_bytes(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(re.split(r"[,\s]+", text.strip()))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(NAMES)}")
    return names


def _micro_batch(text: str) -> tuple[str, int | None]:
    name, _, number = text.partition("=")
    _names(name)
    if number == "auto" and not rival(name).chooses:
        raise argparse.ArgumentTypeError(f"{name} chooses no micro-batch")
    return name, None if number == "auto" else int(number)


def _choice(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, parse_yaml(value)


if __name__ == "__main__":
    main()
