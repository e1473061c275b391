"""Generation without a cache: each token is one pass of an engine over all tokens before it."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from megatrain.compat.transformers import CausalLMOutput
from megatrain.generate.resident import TextModel


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
