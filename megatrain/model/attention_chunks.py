"""Causal attention by matrix products, a chunk of queries at a time: memory is linear in the row.

It is for cases that torch's flash kernel does not support: soft caps (Gemma 2: `cap * tanh(logit /
cap)`), and CPUs. A chunk's queries are those of all heads that share keys. Its logits exist twice
in the forward, four times in the backward. On a GPU one compiled kernel runs between two products.

Legend: B rows, T tokens of a row, K heads of keys, G heads of queries that share one, D width.
R rows, N heads (of R rows), C queries and S keys of a chunk.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.compat.torch import can_compile, for_many_shapes, let_triton_launch, mark_dynamic

MOST_LOGITS = 1 << 28  # that exist at once, unless a single head of a chunk has more
# Queries of a chunk, in all heads that share keys. An H200 waits for the launches of smaller
# chunks; a CPU does not, and takes a quarter.
QUERIES = 4096
_ROWS = 4  # computed together, at most
_ALIGNED = 128  # kernels are quicker if keys begin and end at multiples of this
_LARGEST = 70.0  # exponentials of logits up to this, and their sums, are finite in fp32


class Seen(NamedTuple):
    """The tokens to which each token attends, and the factors of logits."""

    first_BT: Tensor  # place in the row of the first token to which each token attends
    last_BT: Tensor  # place of the last one, which is never after the token itself
    reach: int  # a token attends to fewer than so many tokens before itself
    scale: float
    cap: float  # the soft cap of logits; 0: none


@torch.no_grad()  # with gradients kernels would be compiled twice
def attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen
) -> tuple[Tensor, Tensor]:
    """The result `[B, T, H, D]`, and the logarithms of the softmax's sums `[B, T, H]` in fp32."""
    q_BTKGD, k_BTKGD, v_BTKGD = (_grouped(x, key) for x in (query, key, value))
    out = torch.empty(q_BTKGD.shape, dtype=query.dtype, device=query.device)
    sums_BTKG = query.new_empty(q_BTKGD.shape[:-1], dtype=torch.float32)
    fused = _fused(_weights, query.is_cuda)
    most_tokens = _most_tokens(q_BTKGD.shape[3], query.is_cuda)
    for rows, heads in _pieces(k_BTKGD):
        k_NTD, v_NTD = (_by_head(x[rows, :, heads]) for x in (k_BTKGD, v_BTKGD))
        for queries, keys in _spans(q_BTKGD.shape[1], most_tokens, seen.reach):
            chunk = rows, queries, heads
            q_RCKGD = q_BTKGD[chunk]
            logits = _by_head(q_RCKGD) @ k_NTD[:, keys].mT
            weights, totals, logs = fused(
                seen.scale, seen.cap, *_operands(q_RCKGD, seen, chunk, keys, logits)
            )
            weighted_RCKGD = _by_token(weights.reshape(logits.shape) @ v_NTD[:, keys], q_RCKGD)
            out[chunk] = (weighted_RCKGD / totals.transpose(1, 2)[..., None]).to(out.dtype)
            sums_BTKG[chunk] = logs.transpose(1, 2)
            del logits, weights  # before the next chunk's are made
    return out.view(query.shape), sums_BTKG.flatten(2)


@torch.no_grad()
def gradients_in_chunks(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums_BTH: Tensor,
    seen: Seen,
) -> list[Tensor]:
    """Gradients of queries, keys and values; `sums_BTH` are of `attend_in_chunks`."""
    of_heads = (query, key, value, gradient, out)
    q_BTKGD, k_BTKGD, v_BTKGD, g_BTKGD, o_BTKGD = (_grouped(x, key) for x in of_heads)
    sums_BTKG = sums_BTH.unflatten(2, q_BTKGD.shape[2:4])
    dq, dk, dv = (torch.empty_like(x) for x in (q_BTKGD, k_BTKGD, v_BTKGD))
    fused = _fused(_slopes, query.is_cuda)
    most_tokens = _most_tokens(q_BTKGD.shape[3], query.is_cuda)
    for rows, heads in _pieces(k_BTKGD):
        k_NTD, v_NTD = (_by_head(x[rows, :, heads]) for x in (k_BTKGD, v_BTKGD))
        dk_NTD, dv_NTD = (torch.zeros_like(x, dtype=torch.float32) for x in (k_NTD, v_NTD))
        for queries, keys in _spans(q_BTKGD.shape[1], most_tokens, seen.reach):
            chunk = rows, queries, heads
            q_RCKGD = q_BTKGD[chunk]
            q, g = _by_head(q_RCKGD), _by_head(g_BTKGD[chunk])
            k = k_NTD[:, keys]
            products = q @ k.mT, g @ v_NTD[:, keys].mT
            sums = sums_BTKG[chunk].transpose(1, 2).clone(memory_format=torch.contiguous_format)
            g_times_out = (g.float() * _by_head(o_BTKGD[chunk])).sum(-1).view(sums.shape)
            operands = _operands(q_RCKGD, seen, chunk, keys, *products)
            shares, slopes = fused(seen.scale, seen.cap, *operands, sums, g_times_out)
            shares, slopes = (x.reshape(products[0].shape) for x in (shares, slopes))
            dv_NTD[:, keys] += shares.mT @ g
            dk_NTD[:, keys] += slopes.mT @ q
            dq[chunk] = _by_token(slopes @ k, q_RCKGD)
            del products, operands, shares, slopes  # before the next chunk's are made
        for gradients, sums_NTD in ((dk, dk_NTD), (dv, dv_NTD)):
            gradients[rows, :, heads] = _by_token(sums_NTD, k_BTKGD[rows, :, heads])
    return [dq, dk, dv]


def cost_of_chunks(
    query: Tensor, key: Tensor, reach: int, *, backward: bool
) -> tuple[int, int, int]:
    """Numbers of logits and chunks of a call, and the bytes that it takes beside its results.

    The bytes are the same for few rows and many: forecasts need costs that are affine in rows.

    Args: `query`, `key`: `[B, T, H, D]`; `reach`: as of `Seen`.
    """
    rows, tokens, heads, width = query.shape
    key_heads = key.shape[2]
    num_rows, num_heads = _at_once(tokens, key_heads)
    most_tokens = _most_tokens(heads // key_heads, on_gpu=True)  # chunks on a CPU take less
    spans = _spans(tokens, most_tokens, reach)
    lengths = [(queries.stop - queries.start, keys.stop - keys.start) for queries, keys in spans]
    chunks = rows * -(-key_heads // num_heads) * len(lengths) // num_rows
    queries = max(queries for queries, _ in lengths) * (heads // key_heads)
    keys = max(keys for _, keys in lengths)
    logit_copies, key_copies, sum_bytes = (4, 3, 8) if backward else (2, 2, 0)  # fp32 dk and dv
    elements = logit_copies * queries * keys + width * (key_copies * tokens + 6 * queries)
    scratch = num_rows * num_heads * (elements * query.itemsize + width * tokens * sum_bytes)
    return rows * heads * sum(a * b for a, b in lengths), chunks, scratch


def _at_once(tokens: int, heads: int) -> tuple[int, int]:
    """Rows, and heads of keys, that are computed together."""
    matrices = max(1, MOST_LOGITS // (QUERIES * tokens))  # of logits: one for each row and head
    return min(_ROWS, max(1, matrices // heads)), min(heads, matrices)


def _pieces(k_BTKGD: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of rows, and of heads of keys, that are computed together."""
    rows, tokens, heads = k_BTKGD.shape[:3]
    num_rows, num_heads = _at_once(tokens, heads)
    for row in range(0, rows, num_rows):
        for head in range(0, heads, num_heads):
            yield slice(row, row + num_rows), slice(head, head + num_heads)


def _most_tokens(groups: int, on_gpu: bool) -> int:
    """The largest number of tokens whose queries are one chunk."""
    return max(1, (QUERIES if on_gpu else QUERIES // 4) // groups)


def _spans(tokens: int, most_tokens: int, reach: int) -> Iterator[tuple[slice, slice]]:
    """Each chunk's queries and keys; the chunk with most keys first, whose memory serves all."""
    for start in reversed(range(0, tokens, most_tokens)):
        stop = min(start + most_tokens, tokens)
        first_key = max(0, start + 1 - reach) // _ALIGNED * _ALIGNED
        yield slice(start, stop), slice(first_key, stop)


def _operands(
    q_RCKGD: Tensor, seen: Seen, chunk: tuple, keys: slice, *products: Tensor
) -> list[Tensor]:
    """Products `[N, C G, S]` as `[R, K, C, G, S / A, A]` (A keys are aligned), and places in rows.

    The places are the first and last to which queries attend `[R, C]`, and those of keys.
    """
    rows, num, heads, groups, _ = q_RCKGD.shape
    places = torch.arange(keys.start, keys.stop, device=q_RCKGD.device, dtype=torch.int32)
    aligned = _ALIGNED if len(places) % _ALIGNED == 0 else 1
    shape = rows, heads, num, groups, -1, aligned
    *viewed, places = *(x.view(shape) for x in products), places.view(shape[4:])
    for tensor in (*viewed, places):
        mark_dynamic(tensor, tensor.ndim - 2)
    bounds = (seen.first_BT[chunk[:2]], seen.last_BT[chunk[:2]])
    first, last = (x.clone(memory_format=torch.contiguous_format) for x in bounds)
    return [*viewed, first, last, places]


def _capped(
    scale: float, cap: float, products: Tensor, first_RC: Tensor, last_RC: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits in fp32, and True for those of tokens to which queries attend."""
    logits = products.float() * scale
    if cap:
        logits = cap * (logits / cap).tanh()
    first, last = (x[:, None, :, None, None, None] for x in (first_RC, last_RC))
    return logits, (places >= first) & (places <= last)


def _weights(scale: float, cap: float, products: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
    """Exponentials of logits less the largest, their sums, and logarithms of the full sums."""
    logits, is_seen = _capped(scale, cap, products, *places)
    largest = torch.zeros_like(logits[..., 0, 0])
    if not 0 < cap <= _LARGEST:
        largest = logits.where(is_seen, -torch.inf).amax((-2, -1))
    weights = (logits - largest[..., None, None]).exp().where(is_seen, 0)
    sums = weights.sum((-2, -1))
    return weights.to(products.dtype), sums, sums.log() + largest


def _slopes(
    scale: float, cap: float, products: Tensor, dshares: Tensor, *places_and_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """The softmax's probabilities (shares), and the gradients of `products` (slopes)."""
    *places, sums, g_times_out = places_and_sums
    logits, is_seen = _capped(scale, cap, products, *places)
    shares = (logits - sums[..., None, None]).exp().where(is_seen, 0)
    slopes = shares * (dshares.float() - g_times_out[..., None, None]) * scale
    if cap:
        slopes = slopes * (1 - (logits / cap).square())
    return shares.to(products.dtype), slopes.to(products.dtype)


@cache
def _fused(function: Callable[..., Any], on_gpu: bool) -> Any:
    """A function of tensors as one compiled kernel, if a GPU computes and Triton can build it."""
    if not (on_gpu and can_compile()):
        return function
    let_triton_launch()
    return for_many_shapes(torch.compile(function))


def _grouped(of_heads: Tensor, key: Tensor) -> Tensor:
    """`[B, T, H, D]` as `[B, T, K, G, D]`; on a CPU in fp32."""
    of_heads = of_heads if of_heads.is_cuda else of_heads.float()
    return of_heads.unflatten(2, (key.shape[2], -1))


def _by_head(x_RCKGD: Tensor) -> Tensor:
    """`[R K, C G, D]`, dense."""
    return x_RCKGD.transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()


def _by_token(x_NCD: Tensor, like_RCKGD: Tensor) -> Tensor:
    """The inverse of `_by_head`: `[R, C, K, G, D]` from `[N = R K, C G, D]`."""
    rows, queries, heads, groups, width = like_RCKGD.shape
    return x_NCD.view(rows, heads, queries, groups, width).transpose(1, 2)
