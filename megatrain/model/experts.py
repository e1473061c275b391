"""The experts of a layer, some at a time.

transformers 5 keeps all experts of a layer in parameters whose first dimension counts them, and
calls them as `experts(hidden_ND, index_NK, weights_NK)`. A few of them are the same module with
shorter parameters, given the tokens that chose them. Whether that is so is tried, on small experts
with random weights.

Legend: N tokens, D width, K experts chosen by a token, E experts, S (token, choice) pairs.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig

from megatrain.compat.torch import without_modes
from megatrain.errors import RunFailed
from megatrain.model.token_chunks import behaves

_FEW, _TOKENS, _CHOSEN = 4, 7, 2  # of a trial
_UNIT = 16  # what sizes are multiples of in it, as kernels want them

# How configurations name the number of a layer's experts, and of those that a token chooses.
_EVERY = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OF_A_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)

Forward = Callable[..., Any]
ExpertRows = tuple[Tensor, Tensor, Tensor]  # rows [S, D], each one's expert [S], its share [S]


@dataclass
class Chosen:
    """The pairs of a token and one of its choices that fall on some experts.

    Attributes:
        tokens_S, choices_S: first all first choices, then all second ones, ...
        counts: how many of each.
    """

    tokens_S: Tensor
    choices_S: Tensor
    counts: list[int]

    @classmethod
    def among(cls, index_NK: Tensor, start: int, stop: int) -> "Chosen":
        """The pairs that fall on the experts from `start` to before `stop`."""
        inside_KN = ((index_NK >= start) & (index_NK < stop)).T
        choices_S, tokens_S = inside_KN.nonzero(as_tuple=True)
        return cls(tokens_S, choices_S, inside_KN.sum(1).tolist())

    def add(self, total_ND: Tensor, rows_SD: Tensor) -> None:
        """Add each pair's row to its token, choice by choice: so the order is always the same."""
        parts = zip(self.tokens_S.split(self.counts), rows_SD.split(self.counts), strict=True)
        for tokens, rows in parts:
            total_ND.index_add_(0, tokens, rows.to(total_ND.dtype))


@dataclass
class Experts:
    """The experts of one kind of layer.

    Attributes:
        path: of their module in the layer.
        shapes: of their parameters, by their names in the module.
    """

    path: str
    module: nn.Module
    shapes: dict[str, torch.Size]
    num: int

    def run(
        self, weights: Mapping[str, Tensor], rows_SD: Tensor, index_S: Tensor, share_S: Tensor
    ) -> Tensor:
        """Run some experts, whose `weights` are given, on one row each `[S, D]`.

        Args:
            index_S: each row's expert, counted from the first of these.
            share_S: what its result is multiplied by.
        """
        self.module.num_experts = len(next(iter(weights.values())))  # type: ignore[assignment]
        given = (rows_SD, index_S[:, None], share_S[:, None])
        return functional_call(self.module, dict(weights), given)


def share_of_a_token(config: PreTrainedConfig, shape: Sequence[int]) -> float:
    """How much of a parameter computes with one token: of all experts `[E, I, O]`, the chosen."""
    text = config.get_text_config(decoder=True)
    every, chosen = (
        next((n for name in names if type(n := getattr(text, name, None)) is int), 0)
        for names in (_EVERY, _OF_A_TOKEN)
    )
    return chosen / every if chosen and len(shape) == 3 and shape[0] == every else 1.0


def find_experts(layer: nn.Module) -> Experts | None:
    """The experts of a layer; None: it has none, or none that can be taken some at a time."""
    with torch.no_grad(), without_modes():
        modules = layer.named_modules()
        found = [Experts(path, *made) for path, module in modules if (made := _experts(module))]
        return found[0] if len(found) == 1 and _can_be_split(found[0]) else None


def _experts(module: nn.Module) -> tuple[nn.Module, dict[str, torch.Size], int] | None:
    num = getattr(module, "num_experts", None)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    given = list(inspect.signature(type(module).forward).parameters)[1:]
    if not isinstance(num, int) or not shapes or list(module.buffers()) or len(given) != 3:
        return None
    if behaves(module):
        return None
    if any("." in name or shape[0] != num or len(shape) < 2 for name, shape in shapes.items()):
        return None
    clone = copy.deepcopy(module)
    clone.__dict__.pop("forward", None)
    return clone, shapes, num


def _can_be_split(experts: Experts) -> bool:
    """True if a few small experts with random weights give the same in two parts."""
    sizes = {size for shape in experts.shapes.values() for size in shape[1:]}
    unit = gcd(*sizes)
    small = {size: size // unit * min(unit, _UNIT) for size in sizes}
    few = replace(experts, module=copy.deepcopy(experts.module))
    for name, value in vars(few.module).items():
        if type(value) is int and value in small:
            setattr(few.module, name, small[value])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = {
        name: random(_FEW, *(small[size] for size in shape[1:]))
        for name, shape in experts.shapes.items()
    }
    chosen = [torch.randperm(_FEW, generator=generator)[:_CHOSEN] for _ in range(_TOKENS)]
    index_NK, share_NK = torch.stack(chosen), random(_TOKENS, _CHOSEN)
    for width in sorted(small.values()):
        given = (random(_TOKENS, width), index_NK, share_NK)
        try:
            whole, parts = _in_two_parts(few, weights, given)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # of another width
        if whole.shape == given[0].shape:
            return torch.allclose(whole, parts, 1e-4, 1e-5)
    return False


def _in_two_parts(
    experts: Experts, weights: dict[str, Tensor], given: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The results of experts on `given`, at once and in two parts."""
    hidden_ND, index_NK, share_NK = given
    experts.module.num_experts = _FEW  # type: ignore[assignment]
    whole_ND = functional_call(experts.module, weights, given)
    total_ND = torch.zeros_like(whole_ND)
    for start, stop in ((0, 1), (1, _FEW)):
        pairs = Chosen.among(index_NK, start, stop)
        some = {name: weight[start:stop] for name, weight in weights.items()}
        where = (pairs.tokens_S, pairs.choices_S)
        rows_SD, index_S = hidden_ND[pairs.tokens_S], index_NK[where] - start
        pairs.add(total_ND, experts.run(some, rows_SD, index_S, share_NK[where]))
    return whole_ND, total_ND


@contextmanager
def in_place(layer: nn.Module, path: str, forward: Forward) -> Iterator[None]:
    """Within this context `forward` stands for that of the module at `path` of a layer."""
    module = layer.get_submodule(path)
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


class StandIn:
    """Takes the place of a layer's experts: notes what they are given, and gives `result`."""

    def __init__(self, experts: Experts, result: Tensor | None) -> None:
        """Args: `result` `[N, D]`; None: the layer's forward ends where they are called."""
        self._signature = inspect.signature(type(experts.module).forward)
        self._result = result
        self.given: tuple[Tensor, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._signature.bind(None, *args, **kwargs).args[1:]
        if self.given or [getattr(leaf, "ndim", 0) for leaf in given] != [2, 2, 2]:
            raise RunFailed(
                "the model calls its experts twice, or not with hidden states, choices and their "
                "weights; its layers cannot be split: leave placement.max_stream_bytes out"
            )
        self.given = given
        if self._result is None:
            raise Given
        return self._result.clone()  # what follows may change it in place


class Given(Exception):
    """Ends a layer's forward where its experts are called; not an error."""
