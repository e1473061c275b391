"""Attention of rows that several ranks share: each has some tokens of every row, of all heads.

As DeepSpeed Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509, section 3): before
attention the ranks exchange queries, keys and values so that each has all tokens of some heads;
then they exchange what it makes back. Made for transformers' models as one of its implementations
of attention, in the place of "sdpa".

Legend: B rows, N ranks, T tokens of a whole row, S of one rank's share (T = N x S), H heads, D
width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.compat.transformers import sdpa_attention_forward
from megatrain.errors import InputError
from megatrain.model.documents import OURS
from megatrain.parallel.distributed import SequenceRanks

_tried: ContextVar[int | None] = ContextVar("_tried", default=None)
_ranks: list[SequenceRanks | None] = []  # by the number that a compiled graph knows them by


@torch.library.custom_op("megatrain::exchange", mutates_args=())
def exchange(blocks: Tensor, ranks: int) -> Tensor:
    """Send block n of `[N, ...]` to rank n; returns the received blocks in the ranks' order."""
    received = torch.empty_like(blocks)
    of_number = _ranks[ranks]
    assert of_number is not None
    of_number.exchange_blocks(received, blocks)
    return received


@exchange.register_fake
def _(blocks: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(blocks)


exchange.register_autograd(
    lambda ctx, gradient: (exchange(gradient.contiguous(), ctx.ranks), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "ranks", inputs[1]),
)


def _whole(ranks: int, size: int, *shares: Tensor) -> list[Tensor]:
    """`[B, H / N, T, D]` of each `[B, H, S, D]`.

    One exchange for queries, keys and values: one order on all ranks, also if compiled.
    """
    split = [x.unflatten(1, (size, -1)) for x in shares]  # [B, N, H / N, S, D]
    blocks = torch.cat([x.permute(1, 0, 3, 2, 4).flatten(3) for x in split], -1)
    received = exchange(blocks, ranks)  # [N, B, S, all heads' widths]
    parts = received.split([x.shape[2] * x.shape[4] for x in split], -1)
    pairs = zip(parts, split, strict=True)
    heads = [part.unflatten(3, (x.shape[2], x.shape[4])) for part, x in pairs]
    return [x.permute(1, 3, 0, 2, 4).flatten(2, 3) for x in heads]


def _share(ranks: int, size: int, out: Tensor) -> Tensor:
    """`[B, S, H, D]` of `[B, T, H / N, D]`."""
    blocks = out.unflatten(1, (size, -1)).transpose(0, 1)  # [N, B, S, H / N, D]
    received = exchange(blocks.contiguous(), ranks)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


@contextmanager
def rows_of(tokens: int) -> Iterator[None]:
    """Within this context masks that change anything in rows of this length are refused."""
    token = _tried.set(tokens)
    try:
        yield
    finally:
        _tried.reset(token)


def attention_of(size: int, ranks: SequenceRanks | None = None) -> str:
    """The name of the implementation for `size` ranks, each of which has its share of every row.

    Args:
        ranks: None: in a trial by one process, a micro-batch's rows are the shares of one row.
    """
    number = len(_ranks)
    _ranks.append(ranks)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        rows, _, tokens, _ = query.shape
        _check(module, attention_mask, options)
        key, value = _repeated(query, key, value, size)
        groups = query.shape[1] // key.shape[1]
        if ranks is None:
            whole_rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
        else:
            whole_rows = _whole(number, size, query, key, value)
        heads: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
        scale_options = {name: options.get(name) for name in ("scaling", "softcap")}
        dropout = options.get("dropout") or 0.0
        out, _ = sdpa_attention_forward(heads, *whole_rows, None, dropout=dropout, **scale_options)
        out = out if ranks is None else _share(number, size, out)
        return out.reshape(rows, tokens, query.shape[1], -1), None

    name = f"{OURS}shared_rows_{number}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def _repeated(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, S, D]` of as many heads as `size` ranks can share evenly.

    Raises:
        InputError: they cannot share the heads of queries.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise InputError(
            f"sequence_parallel is {size}, and the model has {heads} heads of queries, which so "
            "many ranks cannot share evenly; take a number of ranks that divides them"
        )
    several = (n for n in range(1, heads // key_heads + 1) if not heads % (key_heads * n))
    times = next(n for n in several if not key_heads * n % size)
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def _check(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Raises InputError: attention is more than causal, of queries, keys and values."""
    bias, causal = options.get("position_bias"), options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is not None or bias is not None or not causal:
        obstacle = "a mask" if mask is not None else "a bias" if bias is not None else "no order"
        raise InputError(_refused(f"its attention has {obstacle} of its own"))


def _mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs: Any,
) -> None:
    """No mask: attention is causal. Raises InputError where the mask would say more."""
    tokens = _tried.get()
    if tokens is not None and local_size is not None and local_size < tokens:
        raise InputError(_refused(f"its attention reaches {local_size} tokens, rows have {tokens}"))
    plain = allow_is_causal_skip and not allow_is_bidirectional_skip and not use_vmap
    if attention_mask is not None or not plain:
        raise InputError(_refused("its attention has a mask of its own"))


def _refused(why: str) -> str:
    return f"ranks cannot share the rows of this model ({why}); leave sequence_parallel out"
