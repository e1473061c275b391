"""The options of `megatrain bench step`; nothing heavy is imported before it runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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
from megatrain.errors import InputError

SHOWN_LINES = 14  # lines of the breakdown on the terminal

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def _rows(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"write a number of rows, or auto; got {text!r}")
    return text


@bench.callback()
def cases() -> None:
    """Measure, and write the result as JSON."""


@bench.command()
def step(
    context: typer.Context,
    shape: Annotated[
        Literal["toy", "0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b", "120b"],
        typer.Option(help="Take this size of Qwen2.5."),
    ],
    sequences: Annotated[int, typer.Option(min=1, help="Take so many rows a step.")] = 96,
    sequence_length: Annotated[int, typer.Option(min=2, help="Take so many tokens a row.")] = 1024,
    micro_batch: Annotated[
        str, typer.Option(callback=_rows, help="Take so many rows at once, or auto.")
    ] = "16",
    max_grad_norm: Annotated[
        float, typer.Option(min=0.0, help="Clip by this global norm; 0 does not clip.")
    ] = 1.0,
    precision: ComputeDtype = "bf16",
    optimizer: OptimizerName = "adamw",
    states: States = "fp32",
    master: Master = 32,
    device: DeviceName = "auto",
    lora_r: LoraRank = 0,
    base: FrozenBase = "bf16",
    placement: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set a choice of the placement, of several."),
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: Annotated[
        str | None, typer.Option(help="Let planes rest in this folder on a disk.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Take only so many layers.")] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Pack each row of so many random documents.")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Take so many steps before the measured ones.")
    ] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measure so many steps.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32, help="Draw tokens and weights with this seed.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write one step's trace to this file, its picture beside.")
    ] = None,
) -> None:
    """Time whole training steps on random tokens: model TFLOPS, memory, spread."""
    from megatrain.cli.bench_step import StepCase, measure_step

    case = StepCase(
        **{k: v for k, v in context.params.items() if k not in ("output", "timeline")}
        | {
            "micro_batch": None if micro_batch == "auto" else int(micro_batch),
            "max_grad_norm": max_grad_norm or None,
            "placement": parse_placement(placement or []),
        }
    )
    result = measure_step(case, timeline)
    print(*result["breakdown"]["lines"][:SHOWN_LINES], _summary(result), sep="\n")
    if count := result["recompilations_after_warmup"]:
        print(
            f"megatrain: warning: {count} compilations after the warm-up are part of the measured "
            "steps; give more --warmup, or see why with TORCH_LOGS=recompiles",
            file=sys.stderr,
        )
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


def parse_placement(choices: Sequence[str]) -> dict[str, Any] | None:
    """The placement in options `NAME=VALUE`, with values in YAML; None: no options."""
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
