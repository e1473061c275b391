"""The options of `megatrain bench step`; nothing heavy is imported before it runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain.base.units import gib
from megatrain.cli.options import (
    ComputeDtype,
    DeviceMemory,
    DeviceName,
    FrozenBase,
    HostMemory,
    LoraRank,
    Master,
    OptimizerName,
    States,
)
from megatrain.cli.shapes import SHAPES
from megatrain.errors import InputError

SHOWN_LINES = 14  # of the breakdown, on the terminal

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


Disk = Annotated[str | None, typer.Option(help="Let planes rest in this folder on a disk.")]
Documents = Annotated[
    int | None, typer.Option(min=1, help="Pack each row of so many documents, of random lengths.")
]


TimelineFile = Annotated[
    Path | None,
    typer.Option(help="Write one step's Perfetto trace to this file, and its picture beside."),
]


@bench.callback()
def cases() -> None:
    """Measure, and write the result as JSON."""


@bench.command()
def step(
    shape: Annotated[
        str,
        typer.Option(
            callback=_known_shape, help=f"Take this size of Qwen2.5: {', '.join(SHAPES)}."
        ),
    ],
    sequences: Annotated[int, typer.Option(min=1, help="Take so many rows a step.")] = 96,
    sequence_length: Annotated[int, typer.Option(min=2, help="Take so many tokens a row.")] = 1024,
    micro_batch: Annotated[
        str, typer.Option(help="Take so many rows at once; auto chooses with the placement.")
    ] = "16",
    max_grad_norm: Annotated[
        float, typer.Option(min=0.0, help="Clip by this global norm; 0 does not clip.")
    ] = 1.0,
    precision: ComputeDtype = None,
    optimizer: OptimizerName = "adamw",
    states: States = None,
    master: Master = None,
    device: DeviceName = "auto",
    lora_r: LoraRank = 0,
    base: FrozenBase = "bf16",
    placement: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set a choice of the placement. It may be given several times.",
        ),
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Take only so many layers.")] = None,
    documents: Documents = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Take so many steps before the measured ones.")
    ] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measure so many steps.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32, help="Draw tokens and weights with this seed.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    timeline: TimelineFile = None,
) -> None:
    """Time whole training steps on random tokens: model TFLOPS, memory, spread."""
    from megatrain.cli.bench_step import StepCase, measure_step

    case = StepCase(
        shape=shape,
        layers=layers,
        sequences=sequences,
        sequence_length=sequence_length,
        micro_batch=_parse_rows(micro_batch),
        max_grad_norm=max_grad_norm or None,
        precision=precision or "bf16",
        optimizer=optimizer,
        states=states or "fp32",
        master=master or 32,
        lora_r=lora_r,
        base=base,
        device=device,
        placement=parse_placement(placement or []),
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        warmup=warmup,
        steps=steps,
        seed=seed,
        documents=documents,
    )
    _report(measure_step(case, timeline), output)


def _report(result: dict[str, Any], output: Path | None) -> None:
    """Print what a reader looks for first, and write all of it."""
    print(*result["breakdown"]["lines"][:SHOWN_LINES], _summary(result), sep="\n")
    _warn_of_compilations(result["recompilations_after_warmup"])
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _summary(result: dict[str, Any]) -> str:
    peak = result["bf16_peak_tflops"]
    mfu = f", MFU {result['model_tflops'] / peak:.1%}" if peak else ""
    return (
        f"{result['case']['shape']}, {result['tokens_per_step']} tokens a step: "
        f"{result['median_seconds']:.3f} s (median of {result['count']}, "
        f"{result['min_seconds']:.3f} to {result['max_seconds']:.3f}), "
        f"{result['model_tflops']:.4g} model TFLOPS{mfu}; "
        f"device {gib(result['memory']['device_peak_bytes'])}, "
        f"host {gib(result['host_peak_bytes'])} "
        f"({result['host_bytes_per_parameter']:.2f} bytes a parameter)"
    )


def _warn_of_compilations(count: int) -> None:
    if count:
        print(
            f"megatrain: warning: {count} compilations after the warm-up are part of the measured "
            "steps; give more --warmup, or see why with TORCH_LOGS=recompiles",
            file=sys.stderr,
        )


def _parse_rows(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--micro-batch {text}: write a number of rows, or auto")
    return int(text)


def parse_placement(choices: Sequence[str]) -> dict[str, Any] | None:
    """Choices of a placement, each written `NAME=VALUE` with the value in YAML; None: none."""
    from megatrain.base.json_yaml import parse_yaml
    from megatrain.placement import RENAMED, Placement

    parsed = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        if name in RENAMED:
            raise InputError(f"--placement {choice}: {name} is now called {RENAMED[name]}")
        if not equals or name not in Placement.names():
            valid = ", ".join(Placement.names())
            raise InputError(f"--placement {choice}: write NAME=VALUE with NAME one of {valid}")
        try:
            parsed[name] = parse_yaml(value)
        except ValueError as error:
            raise InputError(f"--placement {choice}: {error}") from error
    return parsed or None
