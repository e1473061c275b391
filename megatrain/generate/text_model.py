"""What can generate: an engine or a resident model, and an engine without a cache."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from megatrain.compat.transformers import CausalLMOutput
from megatrain.device import Device
from megatrain.distributed import Ranks


class TextModel(Protocol):
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


class Recomputed(PreTrainedModel, GenerationMixin):
    """An engine as a model that transformers can generate with."""

    def __init__(self, engine: TextModel) -> None:
        super().__init__(PreTrainedConfig())  # nothing is known of how it computes
        self._engine = engine
        self.generation_config = engine.generation_config

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return torch.float32

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any
    ) -> CausalLMOutput:
        """Logits `[B, T, V]` of token ids `[B, T]`."""
        batch = {"input_ids": input_ids.cpu()}
        if attention_mask is not None:
            batch["attention_mask"] = attention_mask.cpu()
            positions = attention_mask.cpu().long().cumsum(-1) - 1
            batch["position_ids"] = positions.masked_fill(positions < 0, 0)
        return CausalLMOutput(logits=self._engine.logits(batch).to(input_ids.device))
