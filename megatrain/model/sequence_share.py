"""Sequence parallelism: the share that each of several ranks has of every row.

All ranks get the same micro-batches and cut them here, once labels have been moved to the tokens
that predict them. Rows are padded at their end, with tokens to which no other attends.

Ranks may share the rows of any model that computes the same with its rows cut: no layer may mix
tokens but by causal attention, and positions must not depend on the row's length. So a trial in one
process computes a short row twice: as a whole, and as shares that attention alone joins.

Attention is that of DeepSpeed Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509,
section 3): ranks exchange queries, keys and values so that each has all tokens of some heads; then
they exchange the results back. It is registered as one of transformers' implementations.

Legend: B rows, N ranks, T tokens of a row, S of one rank's share (T = N x S), H heads, D width.
"""

import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.base.changed import changed
from megatrain.compat.transformers import sdpa_attention_forward, unpacked
from megatrain.errors import InputError
from megatrain.loss import IGNORED, JointLoss, Loss
from megatrain.model.attention import FORWARD, OURS
from megatrain.model.capture import Call
from megatrain.model.documents import TOLERANCE, Micro, at_least_two, change_of, limits_of
from megatrain.model.micro_batch import TrialRun
from megatrain.model.program import ModelProgram
from megatrain.parallel.distributed import ALONE, ProcessGroups, Ranks, exchange, numbered

_TOKENS = 8  # of a share that is tried
_ACCEPTED = ("input_ids", "labels", "position_ids", "attention_mask")
LossInputs = tuple[Tensor, list[Tensor]]  # a micro-batch's targets, and the loss's other inputs


def _refused(why: str) -> InputError:
    return InputError(
        f"ranks cannot share the rows of this model: {why}; leave sequence_parallel out"
    )


class SequenceShare:
    """A rank's share of every row; a single rank has whole rows."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks, self._size = ranks, ranks.size

    @property
    def cuts_rows(self) -> bool:
        """True if each rank has a part of each row: attention is causal, and needs no mask."""
        return self._size > 1

    def tokens(self, num_tokens: int) -> int:
        """Number of tokens in a share of a row of this length."""
        return -(-num_tokens // self._size)

    def check(
        self,
        micro_batches: Sequence[Micro],
        losses: Sequence[LossInputs],
        loss: Loss | None,
        max_tokens: int | None,
    ) -> int:
        """Check that ranks can share these rows; return the rows' checksum.

        The checksum must be equal on all ranks.

        Args: `losses`: targets `[B, T]` of each micro-batch, and the loss's other inputs.

        Raises InputError: ranks cannot share these rows.
        """
        if self._size == 1:
            return 0
        if isinstance(loss, JointLoss):
            raise InputError(
                f"{type(loss).__name__} compares rows: it cannot have sequence_parallel yet"
            )
        accepted = {*_ACCEPTED, *(() if loss is None else (*loss.inputs, *loss.choices))}
        checksum = 0
        for index, micro in enumerate(micro_batches):
            tokens = micro["input_ids"].shape[1]
            padded_tokens = self.tokens(tokens) * self._size
            if max_tokens is not None and padded_tokens > max_tokens:
                raise InputError(
                    f"micro-batch {index} has rows of {tokens} tokens, which {self._size} ranks "
                    f"fill up to {padded_tokens}, and the model has {max_tokens} positions; cut "
                    "the rows"
                )
            refused = [repr(name) for name in micro if name not in accepted]
            places = micro.get("position_ids", torch.arange(tokens))
            if bool((places != torch.arange(tokens)).any()):
                refused.append("position_ids other than 0, 1, 2, ... (as packed rows have)")
            mask = micro.get("attention_mask", torch.ones_like(micro["input_ids"]))
            hides_label = losses and bool(((mask == 0) & (losses[index][0] != IGNORED)).any())
            shows_after_hidden = bool((mask[:, 1:] > mask[:, :-1]).any())
            if hides_label or shows_after_hidden:
                refused.append(
                    "an attention_mask that hides more than the end of rows, without labels"
                )
            if refused:
                raise InputError(
                    f"micro-batch {index} has {refused[0]}, which ranks that share rows do not "
                    "take yet; leave that out, or data.packing, or sequence_parallel"
                )
            for name in sorted(micro):
                data = micro[name].contiguous().view(torch.uint8).numpy().data
                checksum = zlib.crc32(data, checksum)
        return checksum

    def micro(self, micro: Micro) -> Micro:
        """The share of a micro-batch, without labels; its mask is 1 for tokens, 0 for padding."""
        if self._size == 1:
            return micro
        ids = self._cut(micro["input_ids"], 0)
        rows, tokens = ids.shape
        first = self.ranks.rank * tokens
        places = torch.arange(first, first + tokens).expand(rows, tokens).contiguous()
        mask = micro.get("attention_mask", torch.ones_like(micro["input_ids"]))
        return {"input_ids": ids, "position_ids": places, "attention_mask": self._cut(mask, 0)}

    def loss_inputs(self, inputs: Sequence[LossInputs]) -> list[LossInputs]:
        """The share of the targets, and of the loss's other inputs."""
        return [(self._cut(t, IGNORED), [self._cut(x, 0) for x in extras]) for t, extras in inputs]

    def _cut(self, values: Tensor, fill: int) -> Tensor:
        if self._size == 1:
            return values
        tokens_of_rank = self.tokens(values.shape[1])
        padding = tokens_of_rank * self._size - values.shape[1]
        padded = F.pad(values, (0, 0) * (values.ndim - 2) + (0, padding), value=fill)
        return padded[:, self.ranks.rank * tokens_of_rank :][:, :tokens_of_rank].contiguous()

    def joined(self, parts: Sequence[Tensor], micro_batches: Sequence[Micro]) -> list[Tensor]:
        """Whole rows `[B, T, ...]` on the CPU, joined from the shares of all ranks."""
        if self._size == 1:
            return [part.cpu() for part in parts]
        of_ranks = self.ranks.all_gather_object([part.cpu() for part in parts])
        rows = (torch.cat(shares, 1) for shares in zip(*of_ranks, strict=True))
        pairs = zip(rows, micro_batches, strict=True)
        return [part[:, : micro["input_ids"].shape[1]] for part, micro in pairs]


WHOLE = SequenceShare()


class RowTrial:
    """Tries if a model computes the same with its rows cut between ranks."""

    def __init__(
        self,
        share: SequenceShare,
        program: ModelProgram,
        run_trial: Callable[[list[Micro]], TrialRun],
    ) -> None:
        """Args: `run_trial` runs the model on whole rows.

        Raises InputError: ranks cannot share the rows of this model.
        """
        spec = program.spec
        self._share, self._program = share, program
        self._run_trial = run_trial
        self._limits = limits_of(spec.capture.model.config)
        self._equal: set[tuple[int, int]] = set()
        for reason, applies in {
            "it gives scores of rows": spec.capture.task == "SEQ_CLS",
            "it has a loss of its routers (output_router_logits)": spec.balances,
            "it moves biases of its routers (router_bias_update)": bool(spec.router_biases),
            "it takes no position_ids": not spec.capture.accepts("position_ids"),
        }.items():
            if applies:
                raise _refused(reason)
        program.may_attend_by_lengths = False  # packed rows are refused
        assert isinstance(share.ranks, ProcessGroups)
        self._of_ranks = attention_of(share.ranks.size, share.ranks)
        self._of_shares = attention_of(share.ranks.size)
        program.attend(self._of_ranks)

    def check(self, micro_batches: Sequence[Micro]) -> None:
        """Try rows of lengths that are new: between other numbers of the configuration, or powers
        of two. Raises InputError: the model computes something else with rows cut between ranks.
        """
        size = self._share.ranks.size
        for micro in micro_batches:
            tokens = micro["input_ids"].shape[1]
            lengths = tokens, self._share.tokens(tokens) * size
            low, high = (bisect_left(self._limits, length) for length in lengths)
            if (low, high) not in self._equal:
                self._try(tokens, torch.unique(micro["input_ids"]))
                self._equal.add((low, high))

    def _try(self, tokens: int, pool: Tensor) -> None:
        """Compare a whole row's losses with its shares'. Raises InputError: they differ."""
        rows = self._rows(tokens, pool)
        self._program.attend(self._of_shares)
        try:
            with changed([FORWARD], trial_tokens=tokens), unpacked():
                calls, losses = self._run_trial(rows)
        finally:
            self._program.attend(self._of_ranks)
        plain, placed, joined, shares, *_ = losses  # in the order of `_rows`
        # Only in the joined row does a share's last token predict a label, in the next share.
        of_row, of_shares = joined.view(shares.shape)[:, :-1], shares[:, :-1]
        if_cut = "rows are cut: layers mix tokens other than by attention, or attend otherwise"
        for losses_BT, other_BT, why in (
            (plain, placed, "positions are given as 0, 1, 2, ...: it counts them in another way"),
            (of_row, of_shares, if_cut),
        ):
            if not (change := change_of(losses_BT, other_BT)) <= TOLERANCE:  # also if it is NaN
                raise _refused(f"its losses change by {change:.1e} of their spread if {why}")
        if not all(_are_equal(calls[2], alone, rank) for rank, alone in enumerate(calls[4:])):
            raise _refused(
                f"what its layers are told of positions changes with the length of a row (at "
                f"{tokens} tokens), as dynamic rotary embeddings do"
            )

    def _rows(self, tokens: int, pool: Tensor) -> list[Micro]:
        """The inputs of a trial, in this order.

        A row without position ids; with those from 0 on; with those that its tokens have in the
        ranks' shares; then the shares as rows of one micro-batch; then each share alone.
        """
        pool = at_least_two(pool)  # rows of a single token would not show attention
        size, tokens_of_rank = self._share.ranks.size, max(2, self._share.tokens(tokens))
        short = min(_TOKENS, tokens_of_rank)
        generator = torch.Generator().manual_seed(0)
        ids_NS, labels_NS = (
            pool[torch.randint(len(pool), (size, short), generator=generator)] for _ in range(2)
        )
        ends = torch.arange(1, size + 1)[:, None] * tokens_of_rank
        places_NS = ends - short + torch.arange(short)
        shares = {"input_ids": ids_NS, "labels": labels_NS, "position_ids": places_NS}
        rows = [{name: value[n : n + 1] for name, value in shares.items()} for n in range(size)]
        joined = {name: value.view(1, -1) for name, value in shares.items()}
        from_zero = {"position_ids": torch.arange(size * short)[None]}
        plain = {name: value for name, value in joined.items() if name not in from_zero}
        return [plain, plain | from_zero, joined, shares, *rows]


def _are_equal(row_calls: Sequence[Call], share_calls: Sequence[Call], share: int) -> bool:
    """True if layers get the same arguments for a share alone as for the share in its row."""
    row_leaves = [leaf for call in row_calls for leaf in call.leaves]
    share_leaves = [leaf for call in share_calls for leaf in call.leaves]
    for of_row, of_share in zip(row_leaves, share_leaves, strict=True):
        if not (isinstance(of_row, Tensor) and of_row.is_floating_point()):
            continue  # an activation, which the losses compare, or an integer
        if of_row.ndim != of_share.ndim:
            return False
        for dim, size in enumerate(of_share.shape):
            if of_row.shape[dim] != size:
                of_row = of_row.narrow(dim, share * size, size)
        if not torch.equal(of_row, of_share):
            return False
    return True


def _gathered(ranks: int, size: int, *shares: Tensor) -> list[Tensor]:
    """Whole rows of a rank's heads `[B, H / N, T, D]`, from all heads of each rank's share of rows.

    Args: `shares`: queries, keys and values `[B, H, S, D]`. One exchange sends all three, so that
        compiled ranks cannot send them in different orders.
    """
    split = [x.unflatten(1, (size, -1)) for x in shares]  # [B, N, H / N, S, D]
    blocks = torch.cat([x.permute(1, 0, 3, 2, 4).flatten(3) for x in split], -1)
    received = exchange(blocks, None, ranks)  # [N, B, S, all heads' widths]
    parts = received.split([x.shape[2] * x.shape[4] for x in split], -1)
    pairs = zip(parts, split, strict=True)
    heads = [part.unflatten(3, (x.shape[2], x.shape[4])) for part, x in pairs]
    return [x.permute(1, 3, 0, 2, 4).flatten(2, 3) for x in heads]


@cache
def foretold_attention(size: int) -> str:
    """The implementation of `attention_of` on tensors without data, for forecasts."""
    return attention_of(size, Ranks(0, size))


def attention_of(size: int, ranks: Ranks | None = None) -> str:
    """Register an implementation of attention for `size` ranks that share rows; return its name.

    Args: `ranks`: None: in a trial by one process, a micro-batch's rows are the shares of one row.
    """
    number = len(numbered)
    numbered.append(ranks)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        rows, _, tokens, _ = query.shape
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or attention_mask is not None or options.get("position_bias") is not None:
            raise _refused("its attention has a mask, a bias or an order of its own")
        key, value = _repeated(query, key, value, size)
        groups = query.shape[1] // key.shape[1]
        if ranks is None:
            whole_rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
        else:
            whole_rows = _gathered(number, size, query, key, value)
        heads: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
        scale_options = {name: options.get(name) for name in ("scaling", "softcap")}
        dropout = options.get("dropout") or 0.0
        out, _ = sdpa_attention_forward(heads, *whole_rows, None, dropout=dropout, **scale_options)
        if ranks is not None:  # [B, T, H / N, D]: back to all heads of this rank's share
            blocks = out.unflatten(1, (size, -1)).transpose(0, 1)  # [N, B, S, H / N, D]
            out = exchange(blocks.contiguous(), None, number).permute(1, 2, 0, 3, 4)
        return out.reshape(rows, tokens, query.shape[1], -1), None

    name = f"{OURS}shared_rows_{number}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def _repeated(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, S, D]` of as many heads as `size` ranks can share evenly."""
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise InputError(
            f"sequence_parallel is {size}, and the model has {heads} heads of queries, which so "
            "many ranks cannot share evenly; take a number of ranks that divides them"
        )
    # Repeated key heads still divide the heads of queries; the fewest that the ranks share evenly.
    multiples = (n for n in range(1, heads // key_heads + 1) if heads % (key_heads * n) == 0)
    times = next(n for n in multiples if key_heads * n % size == 0)
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def _mask(*args: Any, **kwargs: Any) -> None:
    """No mask, as attention is causal by itself: transformers calls this to make one.

    Raises InputError: the model wants another mask, or a window shorter than the trial's rows.
    """
    tokens, reach = FORWARD.trial_tokens, kwargs.get("local_size")
    if tokens is not None and reach is not None and reach < tokens:
        raise _refused(f"its attention reaches {reach} tokens, rows have {tokens}")
    # The model asks for attention to later tokens, for a function of its own, or always for a mask.
    is_special = kwargs.get("allow_is_bidirectional_skip") or kwargs.get("use_vmap")
    is_special = is_special or not kwargs.get("allow_is_causal_skip", True)
    if is_special or kwargs.get("attention_mask") is not None:
        raise _refused("its attention has a mask of its own")
