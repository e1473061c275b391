"""Several ranks as forked children of the tests' process, which talk by gloo."""

import os
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor

from megatrain import Engine
from megatrain.loss import Loss
from tests.families.plain import Step
from tests.forks import start
from tests.parity.cases import masters, same

Work = Callable[[Any], Any]
Case = Callable[[Any], dict[str, Tensor]]  # a training by a group of ranks, or of one alone


def run_ranks(size: int, folder: Path, work: Work, *, whole: bool = True) -> list[Any]:
    """What `work(group)` returns on each rank; any rank that fails fails the test.

    Nothing, if not all ranks live to the end (`whole`).
    """
    folder.mkdir(exist_ok=True)
    children = [start(partial(_rank, rank, size, folder, work)) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = [folder / f"error {rank}" for rank in range(size)]
    said = [path.read_text() for path in errors if path.exists()]
    assert not any(codes), "\n".join([f"they end with {codes}", *said])
    paths = [folder / f"result {rank}" for rank in range(size if whole else 0)]
    return [torch.load(path, weights_only=False) for path in paths]


def _rank(rank: int, size: int, folder: Path, work: Work) -> None:
    torch.set_num_threads(1)
    # The parent's pool of compiling threads is inherited without its threads.
    inductor.compile_threads = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        torch.save(work(dist.group.WORLD), folder / f"result {rank}")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error {rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


def training(engine: Engine, steps: list[Step], loss: Loss) -> dict[str, Tensor]:
    """What steps of an engine say and leave, by name."""
    said = [engine.step(step, loss) for step in steps]
    plain = [{name: micro[name] for name in ("input_ids", "labels")} for micro in steps[-1]]
    numbers = {
        "losses": [each.loss for each in said],
        "norms": [each.grad_norm for each in said],
        "tokens": [float(each.tokens) for each in said],
        "measures": [v for r in said for v in (*r.measures.values(), *r.experts.values())],
        "evaluated": [engine.evaluate(steps[-1], loss), *engine.score(plain)],
    }
    return {name: torch.tensor(each) for name, each in numbers.items()} | masters(engine)


def assert_as_one(
    alone: dict[str, dict[str, Tensor]], ranks: list[dict[str, dict[str, Tensor]]]
) -> None:
    """Of each case the tensors of all ranks are those of one alone, to the order of sums."""
    for found in ranks:
        for name, tensors in alone.items():
            assert found[name].keys() == tensors.keys()
            for what, value in tensors.items():
                # Logits of weights that may differ by 1e-6 differ by more.
                bound = 1e-5 if what.startswith(("logits", "logprobs", "top ")) else 1e-6
                mine = found[name][what]
                close = mine.shape == value.shape and torch.allclose(
                    mine, value, rtol=2 * bound, atol=bound
                )
                assert close, (name, what, mine, value)


@cache
def _alone(case: Case) -> dict[str, Tensor]:
    """What one rank leaves, which other numbers of ranks are compared with as well."""
    return case(None)


def train_as_one(
    size: int,
    folder: Path,
    cases: Mapping[str, Case],
    names: Iterable[str],
    exact: Container[str] = (),
    mesh: Callable[[Any], Any] = lambda group: group,
) -> list[dict[str, dict[str, Tensor]]]:
    """What ranks leave of each case, which is what one leaves, to the order of sums.

    Args: `exact`: cases whose bits are the same, but for norms and evaluations, which are sums;
        `mesh`: the layout of a group.
    """
    alone = {name: _alone(cases[name]) for name in names}
    ranks = run_ranks(size, folder, lambda group: {n: cases[n](mesh(group)) for n in alone})
    assert_as_one(alone, ranks)
    for name in (name for name in alone if name in exact):
        left = alone[name].keys() - {"norms", "evaluated"}
        for found in ranks:
            assert same({n: found[name][n] for n in left}, {n: alone[name][n] for n in left}), name
    return ranks


def refused(kind: type[Exception], wanted: str, call: Any, *given: Any, **options: Any) -> None:
    """That `call` is refused in words that hold `wanted`."""
    with pytest.raises(kind) as caught:
        call(*given, **options)
    assert wanted in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
