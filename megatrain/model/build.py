"""A Hugging Face causal language model without its weights: structure, buffers, forward."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.errors import InputError


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model configuration in a folder.

    Raises:
        InputError: there is none, or it is not one that transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot read the model configuration in {folder}: {reason}") from error


def empty_model(
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The causal-LM class of `config` with meta parameters and real buffers, in training mode.

    Raises:
        InputError: transformers has no causal language model for this configuration.
    """
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, **chosen
            )
    except (ValueError, ImportError, TypeError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot build a {config.model_type} causal model: {reason}") from error
    model.tie_weights()
    return model.train()


def emptied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` that shares no weights with it: meta parameters, its own buffers."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        meta = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        memo[id(parameter)] = meta
    import copy

    return copy.deepcopy(model, memo).train()


def parameter_dict(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """Every distinct parameter of `module` under its first name."""
    return {prefix + name: p for name, p in module.named_parameters(remove_duplicate=True)}
