"""What can generate: an engine, or a resident model."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from megatrain.device import Device
from megatrain.distributed import Ranks


class Source(Protocol):
    """A model that is open. Only one that `is_whole` has a `whole_model`; all have logits."""

    config: PreTrainedConfig

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the model, and make the same texts together."""

    @property
    def device(self) -> Device:
        """The device that the model computes on."""

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings."""

    @property
    def is_whole(self) -> bool:
        """Whether the transformers model itself can be called."""

    def whole_model(
        self, *, spare: int | None = None, apart: bool = False
    ) -> AbstractContextManager[PreTrainedModel]:
        """The transformers model, to be called within; `spare`, `apart` as of `Engine`."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, T, V]`, fp32 on the CPU, of a micro-batch without labels."""
