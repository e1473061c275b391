"""Buffers and other parts that no step changes: exports give them back bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import InputError
from megatrain.model.safetensors_io import Stored


@dataclass
class Untrained:
    """The parts of a model's source that no step changes.

    Attributes:
        buffers: persistent buffers by name, on the CPU; the model computes with copies that have
            the dtypes of the run's precision.
        computed: buffers that no file of weights has, which the class computes when it is made.
        dtypes: of frozen parameters, by name, as they came; values rest in the tiles.
        carried: tensors of the source's files that the model's class has no place for.
        rounded: the tiles hold fewer bits of some of these than came.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    computed: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    carried: Mapping[str, Stored] = field(default_factory=dict)
    rounded: bool = False

    @property
    def values(self) -> dict[str, Callable[[], Tensor]]:
        """A function for each buffer that returns it, which is what exports take."""
        return {name: partial(Tensor.detach, buffer) for name, buffer in self.buffers.items()}

    def as_came(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Dtypes of what an export in `dtype` writes as it came; None: no dtype was asked for."""
        parameters = self.dtypes if dtype is None else {}
        return parameters | {name: buffer.dtype for name, buffer in self.buffers.items()}

    def check_export(self, dtype: torch.dtype | None) -> None:
        """Refuse an export in a dtype that none has, or of more bits than there are.

        Raises:
            InputError: says so, and how to get them.
        """
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise InputError(
                f"dtype is {dtype!r}; it must be torch.float32, bfloat16 or float16, or None"
            )
        if self.rounded and dtype != torch.bfloat16:
            raise InputError(
                "an engine without an optimizer in bf16 has rounded its weights; export with "
                "dtype=torch.bfloat16, or open the model with precision='fp32'"
            )


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that belong to the model's weights, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that do not belong to the weights, on the CPU, by name."""
    saved = persistent_buffers(model)
    return {n: b.cpu().contiguous() for n, b in model.named_buffers() if n not in saved}
