"""Images and sounds of a micro-batch, and the features that a model's encoders make of them.

A multimodal model of transformers calls `get_image_features` (or `_video_`, `_audio_`) on its
encoders' inputs, and puts the results in the place of tokens. These calls are recorded in one run
of the model's forward, and given back in others: so an encoder runs apart from the text around it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import pytree
from megatrain.compat.transformers import encoder_calls
from megatrain.errors import InputError

# Tensors of each token, or of how a forward runs; all others that such a model takes are media.
_OF_TEXT = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"),
    *("moe_mm_token_type_ids", "labels", "inputs_embeds", "past_key_values", "cache_params"),
    *("use_cache", "logits_to_keep", "num_logits_to_keep", "output_router_logits"),
)


def of_media(name: str) -> bool:
    """True if an argument of a multimodal model's forward describes images or sounds."""
    return name not in _OF_TEXT


def as_computed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels and spectra in the dtype of the computation; times, sizes and the like as they are."""
    return value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value


@dataclass(frozen=True)
class Encoded:
    """The result of one call of an encoder, without its features.

    Attributes:
        leaves: of the result; a shape and dtype stands for features, None for what nobody reads.
    """

    leaves: Sequence[Any]
    spec: Any

    @property
    def numel(self) -> int:
        """The number of features."""
        return sum(prod(leaf.shape) for leaf in self.leaves if isinstance(leaf, _Feature))

    def result(self, features_N: Tensor) -> Any:
        """The result of the call with these features, all in one row."""
        leaves, start = list(self.leaves), 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _Feature):
                stop = start + prod(leaf.shape)
                leaves[index] = features_N[start:stop].view(leaf.shape).to(leaf.dtype)
                start = stop
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Feature:
    shape: torch.Size
    dtype: torch.dtype


class Recorder:
    """Notes the results of a model's encoders in a run of its forward."""

    def __init__(self, touched: set[int], read: set[int]) -> None:
        """Args: ids of the tensors that operations of the run have used, and computed with."""
        self._touched, self._read, self._depth = touched, set[int](), 0
        self._computed, self.inside = read, set[int]()  # inside: what encoders computed with
        self._results: list[Any] = []
        self._leaves = set[int]()  # ids of what the results hold, which nothing else has by then

    def call(self, encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an encoder; one that another encoder calls is a part of that one."""
        if self._depth:
            return encoder(*args, **kwargs)
        self._note()
        self._computed.clear()
        self._depth += 1
        try:
            result = encoder(*args, **kwargs)
        finally:
            self._depth -= 1
            self._touched.clear()
            self.inside |= self._computed
        self._results.append(result)
        self._leaves |= {id(leaf) for leaf in pytree.tree_leaves(result)}
        return result

    def _note(self) -> None:
        """Note which results have been read since the last call."""
        self._read |= self._touched & self._leaves

    def finish(self) -> tuple[list[Encoded], list[Tensor]]:
        """All calls, and their features that were read after them."""
        self._note()
        calls, features = [], list[Tensor]()
        for result in self._results:
            leaves, spec = pytree.tree_flatten(result)
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                    continue
                leaves[index] = None
                if id(leaf) in self._read:
                    leaves[index] = _Feature(leaf.shape, leaf.dtype)
                    features.append(leaf)
            calls.append(Encoded(leaves, spec))
        return calls, features


@contextmanager
def replaced(model: nn.Module, call: Callable[..., Any], media: Collection[str]) -> Iterator[None]:
    """Within this context `call(encoder, *args)` runs in the place of each encoder's call.

    A module all of whose parameters are among those of `media` is an encoder as well (Llama 4 and
    Qwen2-Audio call their projectors so).
    """
    calls = [*encoder_calls(model), *((module, "forward") for module in _apart(model, media))]
    for module, name in calls:
        encoder = getattr(module, name)
        # transformers' generate reads the signature, which `wraps` passes on.
        vars(module)[name] = wraps(encoder)(partial(call, encoder))
    try:
        yield
    finally:
        for module, name in calls:
            del vars(module)[name]


@contextmanager
def replayed(
    model: nn.Module,
    calls: Sequence[Encoded],
    features_N: Tensor,
    media: Collection[str],
    of_text: Callable[[Tensor], bool],
) -> Iterator[None]:
    """Within this context the encoders' calls give these features, in the order of the calls.

    Raises InputError: an encoder is given what has been computed from text (`of_text`).
    """
    parts = iter(zip(calls, features_N.split([call.numel for call in calls]), strict=True))

    def give(encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(of_text, values)):
            raise InputError(
                "an encoder of images or sounds is given features of text: a model that mixes "
                "them so is trained on text alone; leave the images out"
            )
        encoded, part = next(parts)
        return encoded.result(part)

    with replaced(model, give, media):
        yield


def _apart(model: nn.Module, media: Collection[str], path: str = "") -> Iterator[nn.Module]:
    """The outermost modules that have parameters of media alone."""
    for name, module in model.named_children():
        names = [f"{path}{name}.{own}" for own, _ in module.named_parameters()]
        if names and all(name in media for name in names):
            yield module
        elif names:
            yield from _apart(module, media, f"{path}{name}.")
