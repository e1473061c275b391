"""NEFTune: noise on token embeddings while a model is trained."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.errors import InputError


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Let a model in training mode add noise to its token embeddings `[B, T, D]`.

    Uniform within `alpha / sqrt(T * D)` of 0 (Jain et al. 2023, arXiv 2310.05914, where T is the
    length of the row, padding included, as in transformers). The noise comes from the
    device's default generator.

    Raises:
        InputError: the model has no token embedding of that kind.
    """

    def noisy(module: nn.Module, args: tuple, embedded_BTD: Tensor) -> Tensor:
        if not module.training:
            return embedded_BTD
        limit = alpha / math.sqrt(embedded_BTD.shape[1] * embedded_BTD.shape[2])
        return embedded_BTD + torch.empty_like(embedded_BTD).uniform_(-limit, limit)

    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Module):
        raise InputError(
            f"neftune_alpha: a {type(model).__name__} names no token embedding; leave it out"
        )
    embedding.register_forward_hook(noisy)
