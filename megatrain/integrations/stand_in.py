"""The model that a Trainer's loop sees: it has no weights, and says so where they are asked for."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from inspect import Signature
from typing import Any

from torch import nn

from megatrain.api import Engine
from megatrain.errors import InputError


def refused(*_: Any, **__: Any) -> Any:
    """Raises InputError: the weights are the engine's."""
    raise InputError("the model of a StreamedTrainer is streamed; use trainer.engine")


class StandIn(nn.Module):
    """What a Trainer's loop asks its model; the weights are the engine's."""

    main_input_name = "input_ids"

    def __init__(self, engine: Engine, columns: Signature, *, generates: bool) -> None:
        """Args: `columns` of data that the model takes, which Trainers read off its forward."""
        super().__init__()
        forward = partial(refused)
        forward.__signature__ = columns  # type: ignore[attr-defined]
        self.forward = forward
        for name in ("state_dict", "named_parameters"):  # they would be empty
            setattr(self, name, refused)
        # Trainers change them: tokens of the one are exported, the other is what the model is of.
        self.config = deepcopy(engine.config)
        if generates:
            self.generation_config = engine.generation_config
        self._count = engine.num_parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """None, of which Trainers count those that they know of."""
        return iter(())

    def num_parameters(self, **_: Any) -> int:
        """All distinct ones."""
        return self._count

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """The engine chooses what it computes again."""

    activation_checkpointing_enable = gradient_checkpointing_enable
