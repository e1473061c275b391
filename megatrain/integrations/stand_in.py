"""The model that a Trainer's loop and callbacks see: it has no weights and refuses access."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from inspect import getattr_static, signature
from itertools import product
from typing import Any, NoReturn

from megatrain.api import Engine
from megatrain.compat.peft import is_peft_model
from megatrain.errors import InputError

_FACTS = bool | int | float | str | None  # types of attributes that anybody may read


def refuse_weights(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises InputError: the weights are the engine's."""
    raise InputError(
        f"{name} of a StreamedTrainer's model: the model is streamed, and its weights, gradients "
        "and modules are trainer.engine's; change the model before the trainer is made, rates and "
        "the like in optimizer.param_groups"
    )


class StreamedParameter:
    """Stands for the weights in `model.parameters()`: it can be counted, and refuses all else."""

    def __init__(self, count: int, requires_grad: bool) -> None:
        vars(self).update(_count=count, requires_grad=requires_grad)

    def numel(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        refuse_weights(f"parameters() ({name})")

    def __setattr__(self, name: str, value: object) -> None:
        refuse_weights(f"parameters() ({name})")


class ModelStandIn:
    """Has the attributes that a Trainer reads of its model; all others of a model are refused.

    Attributes:
        training: whether the loop trains, and does not evaluate.
    """

    main_input_name = "input_ids"
    _names: set[str]  # of the model's attributes
    _counts: dict[tuple[bool, bool], int]
    _generates: bool

    def __init__(self, model: Any, *, generates: bool = True) -> None:
        """Args: `model`: the streamed one, which is not kept."""
        if not hasattr(model, "named_modules"):
            refuse_weights("a copy")
        inner = model.get_base_model() if is_peft_model(model) else model
        forward = partial(refuse_weights, "forward")
        forward.__signature__ = signature(inner.forward)  # type: ignore[attr-defined]
        names = {*dir(model), *dir(inner)}
        static = {name: getattr_static(inner, name, refuse_weights) for name in names}
        vars(self).update({n: v for n, v in static.items() if isinstance(v, _FACTS)})
        counts = {both: model.num_parameters(*both) for both in product((False, True), repeat=2)}
        vars(self).update(dtype=inner.dtype, name_or_path=inner.name_or_path, forward=forward)
        vars(self).update(training=True, _names=names, _counts=counts, _generates=generates)

    def open(self, engine: Engine, save: Callable[..., None], dropped: Callable[[], None]) -> None:
        """Begin to stand for an engine's model.

        Args:
            save: called as `save_pretrained`.
            dropped: called where gradients are to be dropped.
        """
        # Trainers change them: the one's tokens are exported, the other describes the model.
        vars(self).update(config=deepcopy(engine.config), zero_grad=lambda *_: dropped())
        vars(self).update(save_pretrained=save)
        if self._generates:
            vars(self).update(generation_config=engine.generation_config)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse_weights("forward")

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_names", ()) and name[:2] != "__":
            refuse_weights(name)
        raise AttributeError(f"the model of a StreamedTrainer has no {name}; use trainer.engine")

    def __setattr__(self, name: str, value: object) -> None:
        refuse_weights(name)

    def train(self, mode: bool = True) -> "ModelStandIn":
        """Let the loop train, or evaluate."""
        vars(self).update(training=mode)
        return self

    def eval(self) -> "ModelStandIn":
        """Call `train(False)`."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[StreamedParameter]:
        """Two stand-ins that can be counted: one for all trained weights, one for all others."""
        trained = self.num_parameters(only_trainable=True)
        yield StreamedParameter(trained, True)
        yield StreamedParameter(self.num_parameters() - trained, False)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of values in all distinct parameters that were asked for."""
        return self._counts[only_trainable, exclude_embeddings]

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Does nothing: the engine chooses what it computes again."""

    activation_checkpointing_enable = gradient_checkpointing_enable


class Wrapped:
    """The stand-in as a loop's wrapped model, which Accelerate leaves as it is."""

    def __init__(self, model: ModelStandIn) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
