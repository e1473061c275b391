"""What cannot be streamed, or would not be what the user's configuration asks for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.errors import InputError
from megatrain.model.kind import attributes


class Unsupported(InputError):
    """A model that cannot be streamed; the message says why."""


def refuse_settings(config: PreTrainedConfig) -> None:
    """Refuse settings that add to the loss, or change which layers run, unseen by the engine.

    Raises:
        Unsupported: such a setting is on.
    """
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        if getattr(part, "output_router_logits", None) and _router_weight(part):
            raise Unsupported(
                "output_router_logits is on in the model's configuration, which adds a router "
                "loss that is not computed here; set it to false"
            )
        for name, value in vars(part).items():
            if "layerdrop" in name and isinstance(value, float) and value > 0:
                raise Unsupported(
                    f"{name} is {value} in the model's configuration: layers left out at random "
                    "are not supported; set it to 0"
                )


def _router_weight(config: PreTrainedConfig) -> float:
    names = ("router_aux_loss_coef", "aux_loss_coef")
    given = [getattr(config, name) for name in names if hasattr(config, name)]
    return max(given, default=1.0)


@dataclass(frozen=True)
class Change:
    """An attribute that a forward has changed."""

    module: nn.Module
    name: str
    path: str

    def refusal(self) -> Unsupported:
        return Unsupported(
            f"its forward changes {self.path} as it runs; a model that keeps state of its own is "
            "not supported"
        )

    def spoil(self) -> bool:
        """Make a tensor that was left behind NaN, so that whoever reads it shows it."""
        value = getattr(self.module, self.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(self.module, self.name, torch.full_like(value, torch.nan))
            return True
        return False


class Watch:
    """Notices a forward that changes the plain attributes of its own modules.

    Such a model computes something else after a batch than before it; layers that run again in
    the backward, and for every micro-batch in turn, would not see what plain training sees.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self.before = {(id(m), name): value for _, m, name, value in self._state()}

    def changes(self) -> list[Change]:
        """Attributes that are new or differ from the start."""
        return [
            Change(module, name, ".".join(filter(None, (self.path, path, name))))
            for path, module, name, value in self._state()
            if self.before.get((id(module), name), _NOTHING) != value
        ]

    def _state(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        for path, module in self.module.named_modules():
            for name, value in attributes(module):
                yield path, module, name, value


_NOTHING = object()
