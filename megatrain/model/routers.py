"""The loss that balances experts, as the models of transformers define it.

Fedus et al., 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6, over the routers of all
layers together (`load_balancing_loss_func` of transformers): the number of experts times the sum
over them of the frequency of choice times the mean probability, both by token and layer. All tokens
of a step but padding count together, in whatever micro-batches: as one batch in transformers.

Legend: N tokens, E experts, K experts chosen by a token.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.compat.transformers import recorded_routers
from megatrain.errors import InputError, Unsupported

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class RouterLoss:
    """The loss of routers that a step adds: `weight` times the balance of experts.

    Attributes:
        chosen: K.
    """

    weight: float
    chosen: int

    def sums(self, logits_NE: Tensor, counted_N: Tensor | None) -> Tensor:
        """For each expert the count of choices, then the sum of probabilities: `[1, 2E]`, fp32.

        Args: `counted_N`: 1 for a token, 0 for padding; None: all are tokens.
        """
        share_NE = logits_NE.softmax(-1)
        index_NK = share_NE.topk(self.chosen, -1).indices
        both = torch.cat([torch.zeros_like(share_NE).scatter(1, index_NK, 1), share_NE], 1).float()
        return (both if counted_N is None else both * counted_N[:, None]).sum(0, keepdim=True)

    def total(self, sums: Sequence[Tensor]) -> Tensor:
        """The `sums` of several parts added up."""
        return torch.cat(list(sums)).double().sum(0, keepdim=True).float()

    def balance(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The unweighted balance (scalar), and the gradient of the step's loss by `sums`."""
        often_E, share_E = torch.cat(list(sums)).double().sum(0).chunk(2)
        tokens = often_E.sum() / self.chosen
        slope_E = len(often_E) * often_E / tokens.square()
        slope = torch.cat([torch.zeros_like(slope_E), self.weight * slope_E])
        return (slope_E * share_E).sum().float(), slope.float()[None]


class Tap:
    """Replaces a router's forward, and keeps its logits until they are taken."""

    def __init__(self, router: nn.Module, index: int, loss: RouterLoss) -> None:
        self._forward, self._index, self._loss = router.forward, index, loss
        self._logits: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        self._logits = output[self._index] if isinstance(output, tuple) else output
        return output

    def take(self, counted_N: Tensor | None) -> Tensor:
        """See `RouterLoss.sums`."""
        logits, self._logits = self._logits, None
        assert logits is not None
        return self._loss.sums(logits.flatten(0, -2), counted_N)


def taken(layer: nn.Module, counted_N: Tensor | None) -> list[Tensor]:
    """The sums of a layer's routers after its forward, as one tensor; empty without routers."""
    forwards = (vars(part).get("forward") for part in layer.modules())
    sums = [forward.take(counted_N) for forward in forwards if isinstance(forward, Tap)]
    return [torch.cat(sums).sum(0, keepdim=True)] if sums else []


def tap(layer: nn.Module, path: str, model: PreTrainedModel, loss: RouterLoss) -> bool:
    """Let a layer's template keep its routers' logits; returns True if it has routers."""
    has_routers = False
    for kind, index, place in recorded_routers(model):
        for name, part in layer.named_modules():
            if isinstance(part, kind) and f".{place}.".replace("..", ".") in f".{path}.{name}.":
                part.forward = Tap(part, index, loss)
                has_routers = True
    return has_routers


def ask_for(model: PreTrainedModel, weight: float) -> None:
    """Set the weight of the routers' loss in the model's configuration; 0: there is none.

    Raises InputError: the weight is no usable number, or the model has no such loss.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < inf:
        raise InputError(f"router_aux_loss_coef is {weight!r}; it must be a number from 0 on")
    text = model.config.get_text_config(decoder=True)
    parts = [p for p in (text, model.config) if hasattr(p, "output_router_logits")]
    holders = [(p, n) for p in (model, text, model.config) for n in _WEIGHTS if hasattr(p, n)]
    if not (parts and holders):
        raise InputError(
            f"router_aux_loss_coef is {weight}, and {type(model).__name__} has no loss of routers; "
            "leave it out"
        )
    for part in parts:
        part.output_router_logits = weight > 0
    for holder, name in holders:
        setattr(holder, name, weight)


def router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The loss that the model's configuration asks for (`output_router_logits`); None: none.

    Raises Unsupported: it asks for the loss, and the model does not name its routers.
    """
    text = model.config.get_text_config(decoder=True)
    parts = (model, text, model.config)
    weights = [getattr(part, name) for part in parts for name in _WEIGHTS if hasattr(part, name)]
    is_on = any(getattr(part, "output_router_logits", None) for part in (text, model.config))
    if not is_on or (weights and not weights[0]):
        return None
    chosen = next((n for p in parts if (n := getattr(p, "num_experts_per_tok", None))), None)
    takes = "output_router_logits" in inspect.signature(model.forward).parameters
    if not (weights and chosen and takes and recorded_routers(model)):
        raise Unsupported(
            "output_router_logits is on in the model's configuration, and "
            f"{type(model).__name__} does not say what its routers' loss is; set it to false"
        )
    return RouterLoss(float(weights[0]), chosen)
