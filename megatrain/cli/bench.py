"""`megatrain bench CASE`: measurements that carry what is needed to repeat them."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from megatrain.cli.bench_case import ROWS, StepCase, build_engine, random_step, statistics_of
from megatrain.cli.shapes import SHAPES
from megatrain.errors import InputError
from megatrain.machine import present_machine
from megatrain.placement import Placement
from megatrain.telemetry.environment import commit, environment
from megatrain.telemetry.gpu import bf16_peak_tflops, find_gpu
from megatrain.telemetry.memory import peak_process_bytes
from megatrain.telemetry.picture import draw
from megatrain.telemetry.recorder import StepRecorder
from megatrain.telemetry.timeline import Span, breakdown, chrome_trace
from megatrain.units import gib

if TYPE_CHECKING:
    from megatrain.engine import Engine

SHOWN_LINES = 14  # of the breakdown, on the terminal

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


# Options that every case has.
Shape = Annotated[
    str, typer.Option(callback=_known_shape, help=f"Size of Qwen2.5: {', '.join(SHAPES)}.")
]
Sequences = Annotated[int, typer.Option(min=1, help="Rows of one optimizer step.")]
SequenceLength = Annotated[int, typer.Option(min=2, help="Tokens of a row.")]
MaxGradNorm = Annotated[float, typer.Option(min=0.0, help="0: no clipping.")]
Precision = Annotated[Literal["bf16", "fp32"], typer.Option(help="Compute dtype.")]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Choices = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="One choice of the placement; repeatable."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Only so many layers.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps before the measured ones.")]
Seed = Annotated[int, typer.Option(min=0)]
Output = Annotated[Path | None, typer.Option(help="Write the result to this file.")]


@bench.callback()
def cases() -> None:
    """Measure one case and write the result as JSON."""


@bench.command()
def step(
    shape: Shape,
    sequences: Sequences = 96,
    sequence_length: SequenceLength = 1024,
    micro_batch: Annotated[
        str, typer.Option(help="Rows of a micro-batch, or auto: chosen with the placement.")
    ] = str(ROWS),
    max_grad_norm: MaxGradNorm = 1.0,
    precision: Precision = "bf16",
    device: DeviceName = "auto",
    placement: Choices = None,
    device_memory: Annotated[
        str | None, typer.Option(help="All that the GPU may give this process, such as 10GiB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory that this process may have, such as 96GiB.")
    ] = None,
    layers: Layers = None,
    warmup: Warmup = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 5,
    seed: Seed = 0,
    output: Output = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write one step's trace for Perfetto to this file, its picture beside."),
    ] = None,
) -> None:
    """Time whole training steps on random tokens: model TFLOPS, memory, spread."""
    case = StepCase(
        shape=shape,
        layers=layers,
        sequences=sequences,
        sequence_length=sequence_length,
        micro_batch=_parse_rows(micro_batch),
        max_grad_norm=max_grad_norm or None,
        precision=precision,
        device=device,
        placement=_parse_placement(placement or []),
        device_memory=device_memory,
        host_memory=host_memory,
        warmup=warmup,
        steps=steps,
        seed=seed,
    )
    result = measure_step(case, timeline)
    for line in result["breakdown"]["lines"][:SHOWN_LINES]:
        print(line)
    print(_summary(result))
    if result["recompilations_after_warmup"]:
        print(_recompiled(result["recompilations_after_warmup"]), file=sys.stderr)
    _write(result, output)


@bench.command()
def checkpoint(
    shape: Shape,
    folder: Annotated[
        Path, typer.Option(help="For two checkpoints (12 bytes a parameter each); must be new.")
    ],
    sequences: Sequences = 96,
    sequence_length: SequenceLength = 1024,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 16,
    max_grad_norm: MaxGradNorm = 1.0,
    precision: Precision = "bf16",
    device: DeviceName = "auto",
    placement: Choices = None,
    layers: Layers = None,
    warmup: Warmup = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps without saves.")] = 5,
    saves: Annotated[int, typer.Option(min=1, help="Measured saves.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="Tell the loss for a save every N steps.")] = 50,
    resume: Annotated[
        bool, typer.Option(help="Load a checkpoint at the end and compare what follows.")
    ] = True,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Time saves in the background of training, what they cost its steps, and a resume."""
    from megatrain.cli.bench_checkpoint import measure_saves, summary

    case = StepCase(
        shape=shape,
        layers=layers,
        sequences=sequences,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        max_grad_norm=max_grad_norm or None,
        precision=precision,
        device=device,
        placement=_parse_placement(placement or []),
        warmup=warmup,
        steps=steps,
        seed=seed,
    )
    result = measure_saves(case, folder, every, saves, resume=resume)
    print(summary(result))
    _write(result, output)


def _write(result: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure_step(case: StepCase, timeline: Path | None = None) -> dict[str, Any]:
    """Build the model of `case`, run its steps and return the result as plain JSON values.

    Two more steps than asked for are run, with times taken of all their work; `timeline` is where
    the second one's trace goes (Trace Event Format).
    """
    started = time.perf_counter()
    engine = build_engine(case)
    try:
        case = replace(case, micro_batch=case.micro_batch or engine.micro_batch or ROWS)
        build_seconds = time.perf_counter() - started
        times, losses, compilations = _timed_steps(engine, case)
        spans = _recorded_step(engine, case)
        if timeline is not None:
            timeline.parent.mkdir(parents=True, exist_ok=True)
            timeline.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
            title = f"One step: {case.shape}, {case.sequences} x {case.sequence_length} tokens"
            draw(spans, timeline.with_suffix(".png"), title)
        tokens = case.sequences * case.sequence_length
        return {
            "benchmark": "step",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "case": asdict(case),
            "placement": engine.placement.as_dict(),
            "parameters": engine.num_parameters,
            "tokens_per_step": tokens,
            "build_seconds": build_seconds,
            "step_seconds": times,
            "losses": losses,
            **statistics_of(times[case.warmup :], tokens, engine.num_parameters),
            **_utilisation(engine, case),
            "compilations": sum(compilations),
            "recompilations_after_warmup": compilations[1],
            "breakdown": breakdown(spans, "compute").as_dict(),
            "memory": engine.memory(),
            "host_peak_bytes": peak_process_bytes(),
            "host_bytes_per_parameter": peak_process_bytes() / engine.num_parameters,
            "machine": _rates(engine, case),
            "environment": environment(str(engine.device.torch_device)),
        }
    finally:
        engine.close()


def _timed_steps(
    engine: "Engine", case: StepCase
) -> tuple[list[float], list[float], tuple[int, int]]:
    """Seconds and loss of every step, those of the warm-up first; compilations in it and after."""
    from megatrain.model.compiled import num_compilations

    times, losses = [], []
    before = warm = num_compilations()
    for index in range(case.warmup + case.steps):
        if index == case.warmup:
            warm = num_compilations()
        micro_batches = random_step(case, engine.config.vocab_size, case.seed + index)
        started = time.perf_counter()
        losses.append(float(engine.step(micro_batches).loss))
        times.append(time.perf_counter() - started)
    return times, losses, (warm - before, num_compilations() - warm)


def _recorded_step(engine: "Engine", case: StepCase) -> list[Span]:
    """The spans of one more step, with the updates of the step before it under its forward."""
    micro_batches = random_step(case, engine.config.vocab_size, case.seed)
    recorder = StepRecorder(engine.recording)
    recorder.begin()
    engine.step(micro_batches)
    recorder.next()
    engine.step(micro_batches)
    return recorder.end()


def _utilisation(engine: "Engine", case: StepCase) -> dict[str, Any]:
    gpu = find_gpu(str(engine.device.torch_device))
    known = gpu is not None and case.precision == "bf16"
    return {"bf16_peak_tflops": bf16_peak_tflops(gpu.name) if gpu and known else None}


def _rates(engine: "Engine", case: StepCase) -> dict[str, Any] | None:
    """What forecasts know of the machine (python -m benchmarks.predictions)."""
    machine = present_machine(str(engine.device.torch_device), precision=case.precision)
    return None if machine is None else machine.as_dict()


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


def _recompiled(count: int) -> str:
    return (
        f"megatrain: warning: {count} compilations after the warm-up are part of the measured "
        "steps; give more --warmup, or see why with TORCH_LOGS=recompiles"
    )


def _parse_rows(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--micro-batch {text}: write a number of rows, or auto")
    return int(text)


def _parse_placement(choices: Sequence[str]) -> dict[str, Any] | None:
    parsed = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        if not equals or name not in Placement.names():
            valid = ", ".join(Placement.names())
            raise InputError(f"--placement {choice}: write NAME=VALUE with NAME one of {valid}")
        parsed[name] = yaml.safe_load(value)
    return parsed or None
