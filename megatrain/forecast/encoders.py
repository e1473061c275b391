"""The cost of images and sounds: of a model's encoders, and of what puts features among tokens.

Sizes of images and places of tokens decide what is computed. They are known, all else has no data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from megatrain.base.units import on_line
from megatrain.compat.torch import TorchDispatchMode, pytree, without_modes
from megatrain.compat.transformers import sdpa_attention_forward
from megatrain.forecast.op_counter import MediaWork, Prologue, Work, counted, tensors
from megatrain.model.attention import BY_IMAGES, attention_within_images
from megatrain.model.capture import Call
from megatrain.model.media import FrozenParts, as_computed
from megatrain.model.micro_batch import MicroBatch
from megatrain.model.program import ModelProgram

ENCODER_LAYERS = 20  # whose number of operations is no recurrence yet


class Known(TorchDispatchMode):
    """Computes with tensors that have data; operations with others have only shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors((args, kwargs), real=True)
        floating = (kwargs.get("dtype") or torch.int64).is_floating_point
        if not tensors(read) and (read or not floating):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            with without_modes():  # masks keep their data beside tensors that have none
                return func(*args, **kwargs)
        if func is torch.ops.aten.index.Tensor:  # its shape follows from the values of masks
            args = args[0], [place for index in args[1] for place in _places(index)]
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    if index is None or index.dtype != torch.bool or index.is_meta:
        return [index]
    with without_modes():
        return index.nonzero(as_tuple=True)


@contextmanager
def in_one_call() -> Iterator[None]:
    """Within this context encoders attend to all images in one call, as they do on a GPU."""
    AttentionInterface.register(BY_IMAGES, _to_some_keys)
    try:
        yield
    finally:
        AttentionInterface.register(BY_IMAGES, attention_within_images)


def _to_some_keys(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of each patch to as many as it sees on average, which takes as much."""
    if cu_seq_lens_q is not None:
        mean = int(cu_seq_lens_q.diff().square().sum()) // query.shape[2]
        key, value = key[:, :, :mean], value[:, :, :mean]
    lengths = ("cu_seq_lens_k", "max_length_q", "max_length_k")
    options = {name: option for name, option in options.items() if name not in lengths}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None


def calls_of_rows(of_one: Sequence[Call], of_two: Sequence[Call], rows: int) -> list[Call]:
    """The layers' calls for so many rows, by those for one and for two; leaves have no data."""
    tensors_of_rows: dict[int, Tensor] = {}
    for call, call_of_two in zip(of_one, of_two, strict=True):
        for leaf, leaf_of_two in zip(call.leaves, call_of_two.leaves, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in tensors_of_rows:
                shape = on_line(leaf.shape, leaf_of_two.shape, rows - 1, 1)
                tensors_of_rows[id(leaf)] = torch.empty(shape, dtype=leaf.dtype, device="meta")
    return [
        Call([tensors_of_rows.get(id(leaf), leaf) for leaf in call.leaves], call.spec)
        for call in of_one
    ]


def give_media(micro: MicroBatch, inputs: Mapping[str, Tensor], program: ModelProgram) -> None:
    """Give a micro-batch the tensors of rows with images or sounds."""
    micro.inputs, micro.media = {"input_ids": inputs["input_ids"]}, {}
    for name, value in inputs.items():
        if program.capture.is_media(name):
            micro.media[name] = as_computed(value, program.dtype)
        elif program.capture.accepts(name) and name not in ("attention_mask", "labels"):
            micro.inputs[name] = value
    micro.rows = replace(micro.rows, ids=inputs["input_ids"])


def media_work(
    program: ModelProgram,
    micro: MicroBatch,
    encoders: Mapping[str, Tensor],
    prologue: Mapping[str, Tensor],
    *,
    trains: bool = True,
) -> MediaWork:
    """The work of a micro-batch, within `Known`, by weights without data.

    Args:
        encoders: of which the trained ones require gradients; prologue: of which all do.
        trains: False leaves the encoders' own backward out.
    """
    trained = [weight for weight in encoders.values() if weight.requires_grad and trains]
    frozen = {name for name, weight in encoders.items() if not weight.requires_grad}
    parts = FrozenParts(program.capture.model, frozen) if trained and frozen else None
    encode = partial(program.encode, encoders, micro, parts)
    ignored = encoders, prologue, micro.inputs, micro.media, micro.rows.tables
    if parts is not None:  # as the first backward, which finds the parts whose results are kept
        with torch.enable_grad():
            encode()
    with torch.no_grad():
        encoding, features_N = counted(encode, ignored, real=True)
    kept_bytes = sum(row.nbytes for _, row in micro.kept)
    again = Work()
    if trained:
        again, _ = counted(
            partial(_with_gradients, encode, trained), (*ignored, micro.kept), real=True
        )
    program.follow_media(micro)
    leaf_N = torch.empty_like(features_N).requires_grad_()
    enter = partial(program.prologue, prologue, micro, leaf_N)
    with torch.enable_grad():
        entering, values = counted(enter, (ignored, leaf_N), real=True)
    sources = [*micro.rows.tables.values(), *prologue.values(), leaf_N]
    leaving, _ = counted(partial(_with_gradients, enter, sources), (ignored, leaf_N), real=True)
    before_layers, feature_bytes = Prologue.of(micro.calls, values), features_N.nbytes
    return MediaWork(encoding, again, entering, leaving, kept_bytes, feature_bytes, before_layers)


def _with_gradients(run: Callable[[], Any], sources: Sequence[Tensor]) -> None:
    with torch.enable_grad():
        results = [leaf for leaf in pytree.tree_leaves(run()) if leaf.is_floating_point()]
    gradients = [torch.empty_like(result) for result in results]
    torch.autograd.grad(results, sources, gradients, allow_unused=True)
