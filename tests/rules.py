"""The optimizers' rules that sweeps go over: each of RULES, with each choice of what it keeps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatrain import SGD, AdamW, Muon
from megatrain.optim import RULES, Rule
from tests.families.plain import PlainLion, PlainSGD, RoundedAdamW

SWEPT: dict[str, Callable[..., Rule]] = {
    **RULES,
    "adamw bf16": partial(AdamW, states="bf16"),
    "adamw int8": partial(AdamW, states="int8"),
    "sgd plain": partial(SGD, momentum=0.0, weight_decay=0.1),
    "sgd nesterov": partial(SGD, nesterov=True),
    "muon clipped": partial(Muon, clip="all"),
}

# Those whose updates are of flat ranges, with a plain form to compare each bit with.
FLAT = [name for name, make in SWEPT.items() if not make().needs_matrices]

PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, foreach=False),
    "adamw bf16": partial(RoundedAdamW, states="bf16"),
    "adamw int8": partial(RoundedAdamW, states="int8"),
    "lion": PlainLion,
    "sgd": PlainSGD,
    "sgd plain": PlainSGD,
    "sgd nesterov": partial(PlainSGD, nesterov=True),
}


def with_rules(cases: Sequence[tuple[Any, ...]], every: int, plain: int = 1) -> list[Any]:
    """Parameters `*case, rule`: one case in `plain` with AdamW, in `every` with others.

    The other pairs are exhaustive: what a case tries of a rule, its neighbours try as well.
    """
    return [
        pytest.param(*case, rule, marks=[pytest.mark.exhaustive] if rest else [])
        for turn, rule in enumerate(SWEPT)
        for number, case in enumerate(cases)
        for rest in [(number - turn) % (every if turn else plain)]
    ]
