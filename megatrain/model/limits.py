"""What cannot be streamed, or would not be what the user's configuration asks for."""

from collections.abc import Iterator
from typing import Any

from torch import nn
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


class Watch:
    """Notices a forward that changes the plain attributes of its own modules.

    Such a model computes something else after a batch than before it; layers that run again in
    the backward, and for every micro-batch in turn, would not see what plain training sees.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self.before = dict(self._state())

    def check(self) -> None:
        """Compare with the start.

        Raises:
            Unsupported: an attribute has changed.
        """
        for (path, name), value in self._state():
            if value != self.before.get((path, name)):
                raise Unsupported(
                    f"its forward changes {'.'.join(filter(None, (self.path, path, name)))} as it "
                    "runs; a model that keeps state between batches is not supported"
                )

    def _state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self.module.named_modules():
            for name, value in attributes(module):
                yield (path, name), value
