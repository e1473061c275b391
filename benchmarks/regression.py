"""Speed that must not be lost, as ratios to what is measured in the same minute.

    python -m benchmarks.regression

Kernels are held against the plain-torch reference and torch's fused AdamW, a streamed step against
plain PyTorch training of the same model (which recomputes nothing: at best ours takes 4/3 of it).
The two sides take turns, a round's ratio is theirs over ours, and the median of the rounds must
reach a floor. Floors are well below what is usual, and above what is left by a kernel that falls
back to plain torch or loses its vectors, or a step twice as slow.

Times are of the processor, on one thread, so that other programs count little. AdamW against
torch's depends on what binds: 1.09 to 1.22 where memory does (26 bytes a parameter against 28),
0.85 to 1.05 where one core of AVX2 does, which then computes for as long as the data come from the
first-level cache: our planes take more instructions. A case that fails is measured again, and
longer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from benchmarks.kernels import GROUP, split_planes, torch_optimizer
from megatrain import AdamW, Engine, Placement, kernels
from megatrain.kernels import reference
from megatrain.kernels.states import TileRange, UpdateOptions, adamw_scalars

PARAMETERS = 6_000_000  # 156 MB a pass: more than caches hold
ROUNDS, ATTEMPTS = 9, 3


@dataclass(frozen=True)
class Case:
    """Two ways to do the same work.

    Attributes:
        floor: theirs over ours, in seconds, must be at least this.
        usual: what it was where the floor was chosen.
    """

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    floor: float
    usual: float


def kernel_cases() -> Iterator[Case]:
    """What the engine calls (`megatrain.kernels`), so that a silent fallback is seen."""
    master, grad_fp32 = torch.randn(PARAMETERS) * 0.02, torch.randn(PARAMETERS)
    grad = grad_fp32.bfloat16()
    planes = split_planes(master)
    moments = [torch.zeros(PARAMETERS) for _ in range(2)]
    by = adamw_scalars(torch.float32, 10, GROUP)
    given = "adamw", TileRange(*planes, moments, grad), by, UpdateOptions(0, 10, 0.5)
    adamw = partial(kernels.update, *given)
    fused = torch_optimizer(master, grad_fp32, fused=True)
    yield Case("AdamW / torch fused", adamw, fused.step, 0.75, 1.0)
    plain = partial(reference.update, *given)
    yield Case("AdamW / reference", adamw, plain, 8.0, 20.0)
    others: dict[str, tuple[tuple[Tensor, ...], float, float]] = {
        "split": ((master, *planes), 5.0, 12.0),
        "join": ((*planes, master), 2.0, 3.0),
    }
    for name, (arguments, floor, usual) in others.items():
        ours, theirs = (partial(getattr(m, name), *arguments) for m in (kernels, reference))
        yield Case(f"{name} / reference", ours, theirs, floor, usual)


def step_cases() -> Iterator[Case]:
    """A step that computes, and one of small layers that is mostly our own work around them."""
    yield _step_case("step / plain PyTorch, wide layers", 256, 4, 128, 0.5, 0.69)
    yield _step_case("step / plain PyTorch, many layers", 32, 24, 16, 0.28, 0.40)


def _step_case(name: str, width: int, layers: int, length: int, floor: float, usual: float) -> Case:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    ids = torch.randint(1024, (4, length), generator=torch.Generator().manual_seed(0))
    micro_batches = [{"input_ids": part, "labels": part} for part in ids.split(2)]
    placement = Placement(slots=2, update_threads=1)
    engine = Engine(config, optimizer=AdamW(), precision="fp32", device="cpu", placement=placement)
    plain = partial(_plain_step, *_plain_training(config), micro_batches)
    return Case(name, partial(engine.step, micro_batches), plain, floor, usual)


def _plain_training(config: PreTrainedConfig) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_config(config)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _plain_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Mapping[str, Tensor]],
) -> None:
    for batch in micro_batches:
        (model(**batch).loss / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def ratio(case: Case, rounds: int) -> float:
    """Median over rounds of theirs over ours; the sides go first in turn."""
    found = []
    for index in range(rounds + 1):
        sides = [case.ours, case.theirs] if index % 2 else [case.theirs, case.ours]
        seconds = {side: _seconds(side) for side in sides}
        found.append(seconds[case.theirs] / seconds[case.ours])
    return statistics.median(found[1:])  # the first one warms up


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def holds(case: Case) -> bool:
    """Measure a case, again where it fails, and print what was found."""
    for attempt in range(1, ATTEMPTS + 1):
        found = ratio(case, ROUNDS * attempt)
        if found >= case.floor:
            break
    good = found >= case.floor
    word = "ok" if good else "TOO SLOW"
    print(f"{case.name:<38}{found:>8.2f}{case.floor:>8.2f}{case.usual:>8.2f}  {word}", flush=True)
    return good


def main() -> int:
    """0 when every case holds."""
    argparse.ArgumentParser(description="Hold speed ratios to their floors.").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"kernels: {kernels.implementation}")
    print(f"{'theirs / ours':<38}{'ratio':>8}{'floor':>8}{'usual':>8}")
    results = [holds(case) for make in (kernel_cases, step_cases) for case in make()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
