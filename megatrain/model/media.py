"""Runs encoders of images and sounds apart from the text, by recording and replaying their calls.

A multimodal model of transformers calls `get_image_features` (or `_video_`, `_audio_`) on its
encoders' inputs, and puts the results in the place of tokens. The results of these calls are
recorded in one run of the model's forward, and returned in others, which then run no encoder.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import pytree, version_of, without_torch_function
from megatrain.errors import RunFailed
from megatrain.model.token_chunks import draws

CACHES = ("cache", "past_key_values", "cache_params")  # since transformers 5.24 the first alone
# Arguments of a forward that are no tensors of a micro-batch's tokens.
NO_IDS = {"labels", "use_cache", "inputs_embeds", "logits_to_keep", "num_logits_to_keep", *CACHES}
# All other arguments of a multimodal model's forward describe media.
_OF_TEXT = NO_IDS | {
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"),
    *("moe_mm_token_type_ids", "output_router_logits"),
}


def cache_of(output: Mapping[str, Any]) -> dict[str, Any]:
    """The cache in an output, by its name as a forward's argument; empty: there is no cache."""
    return {name: value for name, value in output.items() if name in CACHES}


def of_media(name: str) -> bool:
    """True if an argument of a multimodal model's forward describes images or sounds."""
    return name not in _OF_TEXT


def as_computed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels and spectra in the dtype of the computation; times, sizes and the like unchanged."""
    return value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value


@dataclass(frozen=True)
class Encoded:
    """The result of one call of an encoder, without its features."""

    # of the result: a `_Feature` for features that are read, a meta tensor for others that are
    # floats (not None: hooks of transformers count a layer's results, and pass over None)
    leaves: Sequence[Any]
    spec: Any

    @property
    def numel(self) -> int:
        return sum(prod(leaf.shape) for leaf in self.leaves if isinstance(leaf, _Feature))

    def result(self, features_N: Tensor) -> Any:
        """The result of the call with these features, all in one row."""
        leaves, start = list(self.leaves), 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _Feature):
                stop = start + prod(leaf.shape)
                leaves[index] = features_N[start:stop].view(leaf.shape).to(leaf.dtype)
                start = stop
        result, attributes = pytree.tree_unflatten(leaves, self.spec)
        if attributes:  # those that are no items of the result (`_extra_attributes`)
            vars(result).update(attributes)
        return result


@dataclass(frozen=True)
class _Feature:
    shape: torch.Size
    dtype: torch.dtype


Kept = tuple[Sequence[Encoded], Tensor]  # calls, and their features in one row


class Recorder:
    """Records the results of a model's encoders in a run of its forward."""

    def __init__(self, touched: set[int], read: set[int], inner: "Recorder | None" = None) -> None:
        """Args:
        touched, read: `Uses.touched` and `Uses.read` of the run.
        inner: records the results of modules that these encoders call.
        """
        self._touched, self._read, self._inner, self._depth = touched, read, inner, 0
        self.inside = set[int]()  # ids of tensors with which encoders computed
        self._results: list[tuple[list[Any], Any]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._leaves, self._read_leaves = set[int](), set[int]()  # ids of results, all and read

    def call(self, encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an encoder, which is recorded unless another encoder calls it."""
        if self._depth:
            return encoder(*args, **kwargs)
        self.note()
        self._read.clear()  # so that it has this encoder's tensors alone after the call
        self._depth += 1
        try:
            result = encoder(*args, **kwargs)
        finally:
            self._depth -= 1
            if self._inner is not None:
                self._inner.note()
            self._touched.clear()  # an encoder's own use of a result does not count
            self.inside |= self._read
        # Flattened now, as the caller may change the result.
        self._results.append(pytree.tree_flatten((result, _extra_attributes(result))))
        leaves = self._results[-1][0]
        self._leaves |= {id(leaf) for leaf in leaves}
        with without_torch_function():  # reading a version is no use of a result
            self._versions += [(leaf, version_of(leaf)) for leaf in _tensors(leaves)]
        return result

    def note(self) -> None:
        """Note the results that have been read since the last call."""
        self._read_leaves |= self._touched & self._leaves

    @property
    def changed(self) -> bool:
        """True if a result has been changed in place since its call."""
        return any(version_of(leaf) != version for leaf, version in self._versions)

    def finish(self) -> tuple[list[Encoded], list[Tensor]]:
        """All calls, and those features of them that were read afterwards."""
        self.note()
        calls, features = [], list[Tensor]()
        for leaves, spec in self._results:
            for index, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                    continue
                leaves[index] = torch.empty_like(leaf, device="meta")
                if id(leaf) in self._read_leaves:
                    leaves[index] = _Feature(leaf.shape, leaf.dtype)
                    features.append(leaf)
            calls.append(Encoded(leaves, spec))
        return calls, features


def calls_of(model: nn.Module, media: Collection[str]) -> list[tuple[nn.Module, str]]:
    """The methods, each with its module, by which a forward calls its encoders.

    A module with parameters of `media` alone is an encoder, too (projectors of Llama 4).
    """
    from megatrain.compat.transformers import encoder_calls

    return [*encoder_calls(model), *((module, "forward") for module in _apart(model, media))]


@contextmanager
def replaced(calls: Sequence[tuple[nn.Module, str]], call: Callable[..., Any]) -> Iterator[None]:
    """Within this context `call(method, *args)` replaces each of these methods."""
    methods = [vars(module).get(name) for module, name in calls]
    for module, name in calls:
        method = getattr(module, name)
        # transformers' generate reads the signature, which `wraps` passes on.
        vars(module)[name] = wraps(method)(partial(call, method))
    try:
        yield
    finally:
        for (module, name), method in zip(calls, methods, strict=True):
            del vars(module)[name]
            if method is not None:
                vars(module)[name] = method


@contextmanager
def replayed(
    calls: Sequence[tuple[nn.Module, str]],
    encoded: Sequence[Encoded],
    features_N: Tensor,
    check: Callable[[Tensor], None],
) -> Iterator[None]:
    """Within this context these calls return recorded results, in their order.

    Args: `check`: raises an error if a tensor must not be an argument of a call.
    """
    parts = iter(zip(encoded, features_N.split([call.numel for call in encoded]), strict=True))

    def recorded(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for value in _tensors((args, kwargs)):
            check(value)
        call, part = next(parts)
        return call.result(part)

    with replaced(calls, recorded):
        yield


class FrozenParts:
    """Keeps results of frozen modules of encoders that are trained in part, for their backward.

    A frozen tower then runs once a step. The modules are the outermost ones without a trained
    parameter. The first backward with each kind of media runs them again: results are not kept of
    modules that use random numbers or whose results have a gradient. None are kept any more if
    later operations change a result in place.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        """Args: `names`: of frozen parameters."""
        self._calls = [(module, "forward") for module in _apart(model, names)]
        self._tried = set[frozenset[str]]()

    @contextmanager
    def keeping(
        self, media: Mapping[str, Tensor], kept: list[Kept], touched: set[int]
    ) -> Iterator[Recorder | None]:
        """Within this context a forward puts results into `kept`, and a backward pops them."""
        is_backward = torch.is_grad_enabled()
        if is_backward and kept:
            with replayed(self._calls, *kept.pop(), _require_constant):
                yield None
        elif is_backward:
            from megatrain.compat.transformers import uncollected  # the forward has set hooks

            self._calls = [(part, name) for m, name in self._calls for part in uncollected(m)]
            with replaced(self._calls, self._watched):
                yield None
            self._tried.add(frozenset(media))
        elif frozenset(media) in self._tried:
            recorder = Recorder(touched, set())
            with replaced(self._calls, recorder.call):
                yield recorder
            encoded, features = recorder.finish()
            if recorder.changed:
                self._calls = []
            else:
                kept.append((encoded, in_one_row(features, next(iter(media.values())))))
        else:
            yield None

    def _watched(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a frozen module, which is no longer kept if the backward needs it again."""
        tensors = {str(number): leaf for number, leaf in enumerate(_tensors((args, kwargs)))}
        result, random = method(*args, **kwargs), draws(partial(method, *args, **kwargs), tensors)
        if random or any(leaf.requires_grad for leaf in _tensors(result)):
            module = getattr(method, "__self__", None)
            self._calls = [call for call in self._calls if call[0] is not module]
        leaves, spec = pytree.tree_flatten((result, _extra_attributes(result)))
        # Contiguous, as kept results are: sums over them are then the same to the bit.
        leaves = [leaf.contiguous() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Encoded(leaves, spec).result(torch.empty(0))


def _require_constant(leaf: Tensor) -> None:
    if leaf.requires_grad:
        raise RunFailed(
            "a gradient reaches a frozen part of an encoder of images or sounds, but none did in "
            "earlier micro-batches; train the whole encoder, or freeze it"
        )


def _extra_attributes(result: Any) -> dict[str, Any]:
    """Attributes of a ModelOutput that are not among its items; transformers 5.17 sets some."""
    extra = getattr(result, "__dict__", {}) if isinstance(result, dict) else {}
    return {name: value for name, value in extra.items() if name not in result}


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def in_one_row(features: Sequence[Tensor], like: Tensor) -> Tensor:
    """All features end to end `[N]`; without features, an empty tensor on the device of `like`."""
    if not features:
        return torch.empty(0, device=like.device)
    return torch.cat([feature.reshape(-1) for feature in features])


def _apart(model: nn.Module, media: Collection[str], path: str = "") -> Iterator[nn.Module]:
    """The outermost modules whose parameters all have names in `media`; `path`: of the model."""
    for name, module in model.named_children():
        inside = f"{path}{name}."
        if not any(parameter.startswith(inside) for parameter in media):
            continue
        if all(f"{inside}{parameter}" in media for parameter, _ in module.named_parameters()):
            yield module
        else:
            yield from _apart(module, media, inside)
