"""Models as their configurations make them, which each engine's model is compared with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.compat.transformers import attention_of, configs, experts_of
from megatrain.model import rebuilt
from megatrain.model.export import saved_config


def _once(make: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    made: dict[Any, PreTrainedModel] = {}

    def again(model: PreTrainedModel, dtype: torch.dtype, with_code: bool) -> PreTrainedModel:
        chosen = [(attention_of(part), experts_of(part)) for _, part in configs(model.config)]
        text = saved_config(model, dtype).to_json_string(use_diff=True)
        key = type(model), text, str(chosen), with_code
        if key not in made:
            made[key] = make(model, dtype, with_code)
        return made[key]

    return again


AGAIN = _once(rebuilt._again)


@contextmanager
def made_once() -> Iterator[None]:
    """Within this context each is made once: that is a third of opening an engine of tiny layers.

    Only for tests that change no class of a model.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuilt, "_again", AGAIN)
        yield
