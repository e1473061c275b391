"""Refuses models that cannot be streamed, or settings that would not be heeded."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.compat.torch import buffers_of
from megatrain.errors import InputError
from megatrain.model.fingerprint import Reader


class Unsupported(InputError):
    """A model that cannot be streamed; the message says why."""


def refuse_settings(config: PreTrainedConfig) -> None:
    """Refuse settings that change which layers run, or with which weights, unseen by the engine.

    Raises:
        Unsupported: such a setting is on.
    """
    every = getattr(config, "rescale_every", 0)  # of RWKV
    if 0 < every <= config.get_text_config(decoder=True).num_hidden_layers:
        raise Unsupported(
            f"rescale_every is {every} in the model's configuration: its forward then changes its "
            "own weights where it does not train; set it to 0, which only fp16 needs otherwise"
        )
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, value in vars(part).items():
            if "layerdrop" in name and isinstance(value, float) and value > 0:
                raise Unsupported(
                    f"{name} is {value} in the model's configuration: layers left out at random "
                    "are not supported; set it to 0"
                )


def draws_for_layers(config: PreTrainedConfig) -> bool:
    """True if the forward draws Python's random numbers to choose layers; none are left out."""
    parts = (config, config.get_text_config(decoder=True))
    return any("layerdrop" in name for part in parts for name in vars(part))


def refuse_rounding(
    types: Mapping[str, torch.dtype], computed: Iterable[str], dtype: torch.dtype
) -> None:
    """Refuse to compute in `dtype` with parameters that transformers keeps in float32.

    Args:
        types: of all parameters, as `from_pretrained` gives them in `dtype`.
        computed: names of those that the forward computes with.

    Raises:
        Unsupported: there are such; the message names one.
    """
    wide = sorted(name for name in computed if types.get(name, dtype).itemsize > dtype.itemsize)
    if wide:
        raise Unsupported(
            f"transformers computes with {wide[0]} in float32 whatever the model's dtype "
            f"({len(wide)} parameters in all), and here all weights would be bf16; set "
            "precision to fp32"
        )


@dataclass(frozen=True)
class Change:
    """An attribute or a buffer that a forward has changed."""

    module: nn.Module
    name: str
    path: str

    def refusal(self) -> Unsupported:
        return Unsupported(
            f"its forward changes {self.path} as it runs; a model that keeps state of its own is "
            "not supported"
        )

    def spoil(self) -> bool:
        """Put NaN in place of a tensor that was left behind: whoever reads it shows it."""
        value = getattr(self.module, self.name, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(self.module, self.name, torch.full_like(value, torch.nan))
            return True
        return False


class Watch:
    """Notices a forward that changes attributes or buffers of its own modules.

    Such a model computes something else after a batch than before it; layers that run again in
    the backward, and for every micro-batch in turn, would not see what plain training sees.
    """

    def __init__(self, module: nn.Module, path: str, but: Collection[nn.Module] = ()) -> None:
        """Args: `but` modules that do not run."""
        self.module, self.path = module, path
        self._but = {id(part) for each in but for part in each.modules()}
        self.before = dict(self._state())

    def changes(self) -> list[Change]:
        """Attributes and buffers that are new or differ from the start."""
        modules = dict(self.module.named_modules())
        return [
            Change(modules[path], name, ".".join(filter(None, (self.path, path, name))))
            for (path, name), value in self._state()
            if self.before.get((path, name)) != value
        ]

    def _state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        reader = Reader(self.module, by_identity=True)
        for path, module in self.module.named_modules():
            if id(module) in self._but:
                continue
            for name, value in reader.attributes(module):
                yield (path, name), value
            for name, buffer in buffers_of(module).items():
                yield (path, name), reader.of(buffer)
