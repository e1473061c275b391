"""Losses of routers (balance of experts, z-loss), their biases, and the loads of experts.

The balance is as the models of transformers define it (Fedus et al., 2021,
https://arxiv.org/abs/2101.03961, equations 4 to 6, `load_balancing_loss_func`): over the routers of
all layers, the number of experts times the sum over them of the frequency of choice times the mean
probability, both by token and layer. The z-loss is the mean over tokens and layers of
logsumexp(logits)^2 (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5). All tokens of a step but
padding count together.

Legend: L layers with a router, N tokens, E experts, K experts chosen by a token, S sums of a layer.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.errors import InputError, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
_EXTRAS = "megatrain_routers"  # attribute of a configuration: settings that transformers lacks
NOT_ASKED: Mapping[str, float | None] = {}
BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class RouterLoss:
    """The losses and counts of a step's routers."""

    weight: float = 0.0  # of the balance of experts
    chosen: int = 0  # K
    z_weight: float = 0.0
    # by how much a step moves the bias that a router adds to its scores to choose experts
    # (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2)
    bias_rate: float = 0.0

    @property
    def is_loss(self) -> bool:
        """True if a loss is minimised; else choices are only counted."""
        return bool(self.weight or self.z_weight)

    def experts(self, sums: int) -> int:
        """The number of experts E, from the number of sums S."""
        return (sums - 1 - self.is_loss) // (3 if self.weight else 1)

    def sums(
        self, logits_NE: Tensor, counted_N: Tensor | None, index_NK: Tensor | None = None
    ) -> Tensor:
        """A layer's sums over tokens, `[1, S]`, fp32.

        These are the choices of each expert, and the tokens; for a loss also logsumexp^2, and for
        each expert the top-K choices by probability, and the probabilities.

        Args:
            counted_N: 1 for a token, 0 for padding; None: all are tokens.
            index_NK: the choices of the router; None: those of the largest logits.
        """
        columns = [torch.ones_like(logits_NE[:, :1])]
        if self.is_loss:
            columns.append(logits_NE.float().logsumexp(-1, keepdim=True).square())
        if self.weight:
            share_NE = logits_NE.softmax(-1)
            usual_NK = share_NE.topk(self.chosen, -1).indices
            index_NK = usual_NK if index_NK is None else index_NK
            columns += [_multi_hot(usual_NK, share_NE), share_NE]
        assert index_NK is not None
        columns_NS = torch.cat([_multi_hot(index_NK, logits_NE), *columns], 1).float()
        columns_NS = columns_NS if counted_N is None else columns_NS * counted_N[:, None]
        return columns_NS.sum(0, keepdim=True)

    def balance(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The step's loss of its sums `[L, S]`, which several ranks may have parts of.

        Returns the loads `[L, E]`, the loss's unweighted balance and z-loss `[2]`, and the gradient
        of the weighed loss by a layer's sums.
        """
        sums_LS = torch.stack([part.double() for part in sums]).sum(0)
        num_experts, total_S = self.experts(sums_LS.shape[1]), sums_LS.sum(0)
        slope_S, losses = torch.zeros_like(total_S), total_S.new_zeros(2)
        balanced = num_experts if self.weight else 0
        widths = [num_experts, 1, int(self.is_loss), balanced, balanced]  # of the columns of `sums`
        _, tokens, z, usual_E, share_E = total_S.split(widths)
        _, _, z_slope, _, share_slope_E = slope_S.split(widths)  # views, to be written to
        if self.is_loss:
            z_slope.copy_(self.z_weight / tokens)
            losses[1:] = z / tokens
        if self.weight:
            slope_E = num_experts * usual_E / tokens.square()
            share_slope_E.copy_(self.weight * slope_E)
            losses[0] = (slope_E * share_E).sum()
        return sums_LS[:, :num_experts], losses.float(), slope_S.float()[None]


def _multi_hot(index_NK: Tensor, like_NE: Tensor) -> Tensor:
    """1 for the experts of `index_NK`, 0 for the others, `[N, E]`."""
    return torch.zeros_like(like_NE).scatter(1, index_NK, 1)


class Tap:
    """Replaces a router's forward, and keeps its logits and choices until they are taken."""

    def __init__(self, router: nn.Module, index: int, loss: RouterLoss) -> None:
        self._forward, self._index, self._loss = router.forward, index, loss
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        logits = outputs[self._index if len(outputs) > 1 else 0]
        indices = [x for x in outputs if isinstance(x, Tensor) and x.dtype == torch.int64]
        choices = [x for x in indices if x.ndim > 1 and x.shape[:-1] == logits.shape[:-1]]
        self._outputs = [logits, *choices[:1]]
        return output

    def take(self, counted_N: Tensor | None) -> Tensor | None:
        """`RouterLoss.sums` of the last forward; None: it has made no choices that are known."""
        outputs, self._outputs = [x.flatten(0, -2) for x in self._outputs], []
        if not outputs or (len(outputs) < 2 and not self._loss.weight):
            return None  # PEFT has called a copy of the router, or the router returns no choices
        return self._loss.sums(outputs[0], counted_N, *outputs[1:])


def router_sums(layer: nn.Module, counted_N: Tensor | None) -> list[Tensor]:
    """The sums of a layer's routers after its forward, as one tensor; empty without routers."""
    forwards = (vars(part).get("forward") for part in layer.modules())
    of_layers = [forward.take(counted_N) for forward in forwards if isinstance(forward, Tap)]
    sums = [part for part in of_layers if part is not None]
    return [torch.cat(sums).sum(0, keepdim=True)] if sums else []


def tap(layer: nn.Module, path: str, model: "PreTrainedModel", loss: RouterLoss) -> None:
    """Put a `Tap` on each router of a layer's template, which keeps its logits and choices."""
    from megatrain.compat.transformers import recorded_routers

    for kind, index, place in recorded_routers(model):
        for name, part in layer.named_modules():
            is_inside = f".{place}.".replace("..", ".") in f".{path}.{name}."
            # Towers may list the routers of the language model as well.
            if isinstance(part, kind) and is_inside and not isinstance(part.forward, Tap):
                part.forward = Tap(part, index, loss)


def set_router_losses(model: "PreTrainedModel", settings: Mapping[str, float | None]) -> None:
    """Set losses of routers in a model's configuration, by the names of run files; None: unchanged.

    Raises InputError: a value is no usable number, or the model has no such loss.
    """
    from megatrain.compat.transformers import recorded_routers

    text_config = model.config.get_text_config(decoder=True)
    for name, value in settings.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise InputError(f"{name} is {value!r}; it must be a number from 0 on")
        is_balance = name == "router_aux_loss_coef"  # the only one of the losses in transformers
        configs = [c for c in (text_config, model.config) if hasattr(c, "output_router_logits")]
        owners = (model, text_config, model.config)
        weights = [(owner, n) for owner in owners for n in _WEIGHTS if hasattr(owner, n)]
        has_loss = bool(configs and weights) if is_balance else bool(recorded_routers(model))
        if not has_loss and (value or is_balance):
            raise InputError(
                f"{name} is {value}, but {type(model).__name__} has no "
                f"{'loss of ' if is_balance else ''}routers; leave it out"
            )
        if not is_balance:
            setattr(text_config, _EXTRAS, {**getattr(text_config, _EXTRAS, {}), name: value})
            continue
        for config in configs:
            config.output_router_logits = value > 0
        for owner, attribute in weights:
            setattr(owner, attribute, value)


def router_loss(model: "PreTrainedModel") -> RouterLoss:
    """The losses of routers in a configuration (`output_router_logits`, `set_router_losses`)."""
    from megatrain.compat.transformers import recorded_routers

    text = model.config.get_text_config(decoder=True)
    parts = (model, text, model.config)
    weights = [getattr(part, name) for part in parts for name in _WEIGHTS if hasattr(part, name)]
    is_on = any(getattr(part, "output_router_logits", None) for part in (text, model.config))
    settings = getattr(text, _EXTRAS, {})
    z_weight = float(settings.get("router_z_loss_coef", 0))
    bias_rate = float(settings.get("router_bias_update", 0))
    if not is_on or (weights and not weights[0]):
        return RouterLoss(z_weight=z_weight, bias_rate=bias_rate)
    numbers = [getattr(part, "num_experts_per_tok", None) for part in parts]
    chosen = next(filter(None, numbers), None)
    has_argument = "output_router_logits" in inspect.signature(model.forward).parameters
    if not (weights and chosen and has_argument and recorded_routers(model)):
        raise Unsupported(
            "output_router_logits is on in the model's configuration, and "
            f"{type(model).__name__} does not say what its routers' loss is; set it to false "
            "(under TRL, which sets it, args.router_aux_loss_coef=0.0)"
        )
    return RouterLoss(float(weights[0]), chosen, z_weight, bias_rate)
