"""The host kernels against their plain-torch reference and torch's own AdamW, in one run.

    python -m benchmarks.kernels [--threads 2] [--params 64000000] [--rounds 15]

The cases take turns, so that a machine that slows down slows all of them. Prints a table and
writes benchmarks/results/kernels-<machine>.json.
"""

import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import case_of, parse, write
from megatrain import kernels
from megatrain.kernels import native, reference
from megatrain.kernels.reference import RULES, SUMMED_BYTES
from megatrain.kernels.states import (
    Checksums,
    Scalars,
    TileRange,
    UpdateOptions,
    adamw_scalars,
)
from megatrain.optim import AdamW, moved_bytes
from megatrain.telemetry.host import commit, environment, usable_cores

RESULTS = Path(__file__).parent / "results"
GROUP: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """One thing to time; `bytes_per_param` counts each operand read and each result written."""

    name: str
    bytes_per_param: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Result:
    """Seconds of one call over all parameters, and what follows."""

    name: str
    bytes_per_param: float
    median_s: float
    fastest_s: float
    slowest_s: float
    count: int
    gparam_per_s: float
    gbyte_per_s: float


def split_planes(master: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and remainder of a master [N]."""
    weights = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    kernels.split(master, weights, remainder, threads=usable_cores())
    return weights, remainder


def torch_optimizer(master: Tensor, grad: Tensor, fused: bool) -> torch.optim.Optimizer:
    """Torch's AdamW over one fp32 parameter [N] with its gradient in place."""
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = grad
    return torch.optim.AdamW([parameter], **GROUP, fused=fused, foreach=False)


def adamw_cases(master: Tensor, grad_fp32: Tensor, threads: int) -> list[Case]:
    """One AdamW update, fp32 moments: torch's two, native in its three forms, reference."""
    size = master.numel()
    grad_bf16 = grad_fp32.bfloat16()
    weights, remainder = split_planes(master)
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    whole = master.clone()

    moments, options = [exp_avg, exp_avg_sq], UpdateOptions(0, 10, 0.5, threads)
    by = adamw_scalars(torch.float32, options.step, GROUP)

    def ours(module: ModuleType, *planes: Any) -> Callable[[], object]:
        return partial(module.update, "adamw", TileRange(*planes), by, options)

    split_bf16 = (weights, remainder, moments, grad_bf16)
    fused, plain = (torch_optimizer(master, grad_fp32, fused=fused) for fused in (True, False))
    return [
        Case("torch AdamW, fused, fp32", 28, fused.step),
        Case("native, split master, bf16 grad", 26, ours(native, *split_bf16)),
        Case("native, fp32 master, bf16 grad", 26, ours(native, whole, None, moments, grad_bf16)),
        Case("native, fp32 master, fp32 grad", 28, ours(native, whole, None, moments, grad_fp32)),
        Case("torch AdamW, not fused, fp32", 28, plain.step),
        Case("reference, split master, bf16 grad", 26, ours(reference, *split_bf16)),
    ]


def states_cases(master: Tensor, grad_fp32: Tensor, threads: int) -> list[Case]:
    """Updates by moments and checksums, on a split master with a bf16 gradient."""
    weights, remainder = split_planes(master)
    grad, cases = grad_fp32.bfloat16(), []
    for name in ("fp32", "bf16", "int8"):
        rule, size = AdamW(states=name), master.numel()
        states = [torch.zeros(-(-size // p.group_size), dtype=p.dtype) for p in rule.state_planes]
        planes, tile = (
            (weights, remainder, *states, grad),
            TileRange(weights, remainder, states, grad),
        )
        blocks = [torch.zeros(p.nbytes // SUMMED_BYTES + 1, 2, dtype=torch.int64) for p in planes]
        nothing, written, first = [None] * len(planes), [*blocks[:-1], None], [0] * len(planes)
        for title, sums in {
            "": None,
            ", sums of save": Checksums(nothing, written, first),
            ", sums of step": Checksums(blocks, written, first),
        }.items():
            options = UpdateOptions(0, 10, 0.5, threads, sums)
            update = partial(rule.update, tile, vars(rule), options)
            moved = moved_bytes(rule, torch.bfloat16)
            cases.append(Case(f"native, {name} states{title}", moved, update))
    return cases


def rule_cases(master: Tensor, grad_fp32: Tensor, threads: int) -> list[Case]:
    """Other rules, on a split master with a bf16 gradient."""
    weights, remainder = split_planes(master)
    grad, by, cases = grad_fp32.bfloat16(), Scalars(-1e-5, 1.0, 0.9, 0.1, 0.95, 0.05), []
    for name in [rule for rule in RULES if rule != "adamw"]:
        states = [] if name in ("sgd", "direction") else [torch.zeros(master.numel())]
        tile = TileRange(weights, remainder, states, grad)
        update = partial(native.update, name, tile, by, UpdateOptions(threads=threads))
        cases.append(Case(f"native, {name}", 10 + 8 * len(states), update))
    return cases


def other_cases(master: Tensor, grad_fp32: Tensor, threads: int) -> list[Case]:
    """The kernels beside the update."""
    planes = split_planes(master)
    cases = []
    for name, module in (("native", native), ("reference", reference)):
        split = partial(module.split, master, *planes, threads=threads)
        join = partial(module.join, *planes, master, threads=threads)
        cases += [
            Case(f"{name} split", 8, split),
            Case(f"{name} join", 8, join),
        ]
    return cases


def measure(cases: list[Case], size: int, rounds: int) -> list[Result]:
    """Time every case once a round, in another order each round, after one round to warm up."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for case in order.sample(cases, len(cases)):
            # Torch's threads spin for a while after their work, at the cost of the next case.
            time.sleep(0.02)
            start = time.perf_counter()
            case.run()
            seconds[case.name].append(time.perf_counter() - start)
    return [summary(case, seconds[case.name][1:], size) for case in cases]


def summary(case: Case, seconds: list[float], size: int) -> Result:
    """Median, spread and rates of a case."""
    median = statistics.median(seconds)
    return Result(
        name=case.name,
        bytes_per_param=case.bytes_per_param,
        median_s=round(median, 5),
        fastest_s=round(min(seconds), 5),
        slowest_s=round(max(seconds), 5),
        count=len(seconds),
        gparam_per_s=round(size / median / 1e9, 3),
        gbyte_per_s=round(size * case.bytes_per_param / median / 1e9, 1),
    )


def table(results: list[Result]) -> str:
    """The results as text, medians first."""
    lines = [
        f"{'case':<42}{'median ms':>10}{'spread ms':>16}{'Gparam/s':>10}{'B/param':>9}{'GB/s':>7}"
    ]
    for r in results:
        spread = f"{r.fastest_s * 1e3:.1f}..{r.slowest_s * 1e3:.1f}"
        lines.append(
            f"{r.name:<38}{r.median_s * 1e3:>10.1f}{spread:>16}"
            f"{r.gparam_per_s:>10.3f}{r.bytes_per_param:>9.4g}{r.gbyte_per_s:>7.1f}"
        )
    return "\n".join(lines)


def machine_name(machine: dict[str, Any]) -> str:
    """`amd-epyc-2-cores`: the part of a file name that says where."""
    words = re.sub(r"\(.*?\)|@.*|processor|cpu", " ", str(machine["cpu"]).lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), str(machine["usable_cores"]), "cores"])


def main() -> None:
    """Measure, print, write."""
    options = parse(__doc__, threads=usable_cores(), params=64_000_000, rounds=15, out=RESULTS)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    master, grad = torch.randn(options.params) * 0.02, torch.randn(options.params)
    parts = (adamw_cases, states_cases, rule_cases, other_cases)
    cases = [case for part in parts for case in part(master, grad, options.threads)]
    results = measure(cases, options.params, options.rounds)
    machine = environment("cpu")
    record = {
        "case": case_of(options),
        "kernels": kernels.implementation,
        "commit": commit(),
        "machine": machine,
        "results": [asdict(result) for result in results],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"kernels-{machine_name(machine)}.json"
    write(path, record)
    print(f"{kernels.implementation}, {options.threads} threads, {options.params:,} parameters")
    print(table(results))
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
