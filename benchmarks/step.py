"""`python -m benchmarks.step`: times whole training steps on random tokens.

python -m benchmarks.step --shape 7b --sequences 96 --micro-batch 16 --output step.json
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.options import num_compilations, peak_process_bytes
from megatrain.api import Engine
from megatrain.base.json_yaml import parse_yaml
from megatrain.base.units import gib
from megatrain.cli.app import (
    ComputeDtype,
    DeviceMemory,
    DeviceName,
    FrozenBase,
    HostMemory,
    LoraRank,
    Master,
    States,
)
from megatrain.cli.models import lora_adapter, qwen2_config
from megatrain.cli.plan import changed
from megatrain.cli.reporting import reported
from megatrain.errors import InputError
from megatrain.forecast.workload import Workload
from megatrain.machine import present_machine
from megatrain.optim import RULES, Muon, Rule
from megatrain.parallel.distributed import local_rank
from megatrain.placement import Placement, Precision, Verify, old_name
from megatrain.source.source import Alike, Base
from megatrain.telemetry.gpu import by_driver_name, find_gpu
from megatrain.telemetry.host import commit, environment
from megatrain.telemetry.metrics import model_tflops
from megatrain.telemetry.pictures import draw_step
from megatrain.telemetry.timeline import StepRecorder, breakdown, chrome_trace

ROWS = 16  # of a micro-batch by default
SHOWN_LINES = 14  # lines of the breakdown on the terminal

OptimizerName = Annotated[
    Literal["adamw", "lion", "sgd", "muon", "muon-fp16"],
    typer.Option(help="Update by this rule with its default settings, or Muon with fp16 products."),
]


@dataclass(frozen=True)
class StepCase:
    """The options of one measurement."""

    shape: str
    layers: int | None
    sequences: int
    sequence_length: int
    micro_batch: int | None
    max_grad_norm: float | None
    precision: Precision
    device: str
    placement: dict[str, Any] | None
    warmup: int
    steps: int
    seed: int
    device_memory: str | None = None
    host_memory: str | None = None
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    disk: str | None = None
    master: int = 32
    documents: int | None = None
    lora_r: int = 0
    base: Base = "bf16"
    optimizer: str = "adamw"
    verify: Verify = "save"
    sequence_parallel: int = 1

    @property
    def workload(self) -> Workload:
        """The workload that the engine is made for."""
        workload = Workload(
            self.sequences * self.sequence_length,
            self.sequence_length,
            self.micro_batch,
            self.max_grad_norm is not None,
            rule=rule_named(self.optimizer),
            placement=None if self.placement is None else Placement(**self.placement),
        )
        names = ("precision", "device_memory", "host_memory", "disk")
        options = {name: getattr(self, name) for name in names}
        options["states"] = None if self.states == "fp32" else self.states
        options["master"] = None if self.master == 32 else self.master
        return changed(workload, options)


def measure_step(case: StepCase, timeline: Path | None = None) -> dict[str, Any]:
    """Build the model of `case`, run its steps and return the result as plain JSON values.

    Two further steps are run with all their work timed; `timeline`: the file for
    the second one's trace (Trace Event Format).
    """
    started = time.perf_counter()
    group = dist.group.WORLD if case.sequence_parallel > 1 else None
    with build_engine(case, group) as engine:
        case = replace(case, micro_batch=case.micro_batch or engine.micro_batch or ROWS)
        build_seconds = time.perf_counter() - started
        result = measure_on(engine, case)
        micro_batches = random_step(case, engine.config.vocab_size, case.seed)
        recorder = StepRecorder(engine.recording)
        recorder.start()  # a step's updates run during the next step's forward
        engine.step(micro_batches)
        recorder.start()
        engine.step(micro_batches)
        spans = recorder.end()
        if timeline is not None:
            timeline.parent.mkdir(parents=True, exist_ok=True)
            timeline.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
            title = f"One step: {case.shape}, {case.sequences} x {case.sequence_length} tokens"
            draw_step(spans, timeline.with_suffix(".png"), title)
        steps = {"build_seconds": build_seconds, "breakdown": breakdown(spans, "compute").as_dict()}
        return result | steps | memory_of(engine)


def join_ranks() -> int:
    """Join the ranks that torchrun launched, with a GPU each; returns this one's on its host."""
    mine = local_rank(True) or 0
    if torch.cuda.is_available():
        torch.cuda.set_device(mine)
    dist.init_process_group("gloo")
    return mine


def rule_named(name: str) -> Rule:
    """The optimizer of a case, with its default settings."""
    return Muon(ns_precision="fp16") if name == "muon-fp16" else RULES[name]()


def build_engine(case: StepCase, group: Any = None) -> Engine:
    """An engine with random weights, the same in all layers, as `case` says."""
    return Engine(
        Alike(qwen2_config(case.shape, case.sequence_length, case.layers)),
        **case.workload.for_engine,
        max_grad_norm=case.max_grad_norm,
        device=None if case.device == "auto" else case.device,
        seed=case.seed,
        adapter=lora_adapter(case.lora_r),
        base=case.base,
        group=group,
        verify=case.verify,
        sequence_parallel=case.sequence_parallel,
    )


def random_step(case: StepCase, vocab_size: int, seed: int) -> list[dict[str, Tensor]]:
    """The micro-batches of one step of random tokens, in documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.sequences, case.sequence_length)
    ids_BT = torch.randint(vocab_size, shape, generator=generator)
    step = {"input_ids": ids_BT, "labels": ids_BT}
    if case.documents is not None:
        at_T = torch.arange(case.sequence_length).expand(shape)
        begins_BT = torch.rand(shape, generator=generator).argsort(dim=1) < case.documents
        begins_BT[:, 0] = True
        step["position_ids"] = at_T - torch.where(begins_BT, at_T, 0).cummax(dim=1).values
    parts = {name: tensor.split(case.micro_batch or ROWS) for name, tensor in step.items()}
    return [dict(zip(parts, tensors, strict=True)) for tensors in zip(*parts.values(), strict=True)]


def measure_on(engine: Engine, case: StepCase) -> dict[str, Any]:
    """Time the warm-up and the steps of `case` on an open engine."""
    times: list[float] = []
    losses = []
    before = warm = num_compilations()
    for index in range(case.warmup + case.steps):
        if index == case.warmup:
            warm = num_compilations()
        micro_batches = random_step(case, engine.config.vocab_size, case.seed + index)
        started = time.perf_counter()
        losses.append(float(engine.step(micro_batches).loss))
        times.append(time.perf_counter() - started)
    tokens, device = case.sequences * case.sequence_length, str(engine.device.torch_device)
    gpu, machine = find_gpu(device), present_machine(device, precision=case.precision)
    known = by_driver_name(gpu.name) if gpu and case.precision == "bf16" else None
    return {
        "benchmark": "step",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "case": asdict(case),
        "placement": engine.placement.as_dict(),
        "parameters": engine.num_parameters,
        "trained_parameters": engine.num_trained,
        "computing": engine.computing,
        "tokens_per_step": tokens,
        "step_seconds": times,
        "losses": losses,
        **statistics_of(times[case.warmup :], tokens, *engine.computing),
        "bf16_peak_tflops": known and known.bf16_tflops,
        "compilations": num_compilations() - before,
        "recompilations_after_warmup": num_compilations() - warm,
        "machine": machine and machine.as_dict(),  # for python -m benchmarks.predictions
        "environment": environment(device),
        **memory_of(engine),
    }


def memory_of(engine: Engine) -> dict[str, Any]:
    """The memory at its peak since the process began."""
    peak = peak_process_bytes()
    return {
        "memory": engine.memory(),
        "host_peak_bytes": peak,
        "host_bytes_per_parameter": peak / engine.num_parameters,
    }


def statistics_of(
    times: Sequence[float], tokens: int, parameters: int, trained: int
) -> dict[str, Any]:
    """Spread and rates of measured steps."""
    median = statistics.median(times)
    return {
        "count": len(times),
        "median_seconds": median,
        "min_seconds": min(times),
        "max_seconds": max(times),
        "tokens_per_second": tokens / median,
        "model_tflops": model_tflops(parameters, trained, tokens, median),
    }


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _rows(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"write a number of rows, or auto; got {text!r}")
    return text


@app.command()
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
    sequence_parallel: Annotated[
        int, typer.Option(min=1, help="Share every row among this number of torchrun's ranks.")
    ] = 1,
    verify: Annotated[
        Literal["off", "save", "step"], typer.Option(help="Compare checksums at this time.")
    ] = "save",
    seed: Annotated[
        int, typer.Option(min=0, max=2**32, help="Draw tokens and weights with this seed.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write one step's trace to this file, its picture beside.")
    ] = None,
) -> None:
    """Time whole training steps on random tokens: model TFLOPS, memory, spread."""
    with reported(context):
        case = StepCase(
            **{k: v for k, v in context.params.items() if k not in ("output", "timeline")}
            | {
                "micro_batch": None if micro_batch == "auto" else int(micro_batch),
                "max_grad_norm": max_grad_norm or None,
                "placement": parse_placement(placement or []),
            }
        )
        if sequence_parallel > 1:
            if not dist.is_torchelastic_launched():
                launch = f"torchrun --nproc-per-node {sequence_parallel} -m benchmarks.step ..."
                raise InputError(f"--sequence-parallel needs as many processes: run {launch}")
            join_ranks()
        result = measure_step(case, timeline)
        if sequence_parallel > 1 and dist.get_rank() > 0:
            return
        print(*result["breakdown"]["lines"][:SHOWN_LINES], _summary(result), sep="\n")
        if count := result["recompilations_after_warmup"]:
            print(
                f"megatrain: warning: {count} compilations after the warm-up are part of the "
                "measured steps; give more --warmup, or see why with TORCH_LOGS=recompiles",
                file=sys.stderr,
            )
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _summary(result: dict[str, Any]) -> str:
    peak, gpus = result["bf16_peak_tflops"], result["case"]["sequence_parallel"]
    mfu = f", MFU {result['model_tflops'] / peak / gpus:.1%}" if peak else ""
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
    parsed = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        if (reason := old_name(name)) is not None:
            raise InputError(f"--placement {choice}: {reason}")
        if not equals or name not in Placement.names():
            valid = ", ".join(Placement.names())
            raise InputError(f"--placement {choice}: write NAME=VALUE with NAME one of {valid}")
        try:
            parsed[name] = parse_yaml(value)
        except ValueError as error:
            raise InputError(f"--placement {choice}: {error}") from error
    return parsed or None


if __name__ == "__main__":
    app()
