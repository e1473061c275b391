"""Packed rows: several documents in one row, whose positions restart with each document.

transformers makes an attention mask of the positions, which hides one document from the next. If
attention can use the documents' lengths instead, no mask is made (model/attention.py). In some
models documents are not separate (states, convolutions, windows): rows like those of the data are
tried, and packing is refused if a document's losses change with the document before it.

Legend: B rows, T tokens of a row.
"""

import inspect
import json
import logging
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from megatrain.base.units import gib
from megatrain.compat.torch import mark_dynamic
from megatrain.compat.transformers import attention_of, runs_on
from megatrain.errors import DoesNotFit, InputError, explained
from megatrain.loss import IGNORED
from megatrain.model.attention import BY_EAGER, BY_LENGTHS, BY_MASKS, BY_WINDOWS, document_starts
from megatrain.model.capture import Lookups, Rows, Uses
from megatrain.model.media import of_media
from megatrain.model.micro_batch import MicroBatch, TrialRun
from megatrain.model.program import ModelProgram
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import ALONE, Ranks

_log = logging.getLogger(__name__)

# Changes of losses, as shares of their spread. If documents are separate a change is 0, or 1e-6 as
# experts take tokens in another order; in all families that mix documents it was above 1e-2.
TOLERANCE = 1e-4
NOISES = 10  # a change may be so many times the measured noise of such other orders
# A change of a document before the changed tokens is noise, if it is no more than this.
MOST_NOISE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# If a document changes less than this with its own beginning, a trial shows nothing.
LEAST_CONTEXT = 1e-3

_WITH_MASKS = ("sdpa", "eager", BY_EAGER, BY_LENGTHS, BY_WINDOWS)  # others never make masks
_COMPARED = 4096  # tokens of a row that is also tried with masks
_SHORT = 5  # tokens of the short documents that are tried; fewer have no context
_LEAST_LONGEST = 4096  # tokens; a kernel's empty blocks up to here cost next to nothing
_MIXED = (
    "{} does not keep the documents of a packed row (position_ids that start anew) apart; train it "
    "without packing (data.packing: false)"
)
Micro = Mapping[str, Tensor]
# True for several rows, place of their length among `limits_of`, media, True if media touch.
RowKind = tuple[bool, int, frozenset[str], bool]


def is_packed(micro: Micro) -> bool:
    """True if rows have separate documents: positions `[B, T]` restart, and there is no mask.

    With any attention mask, even one of ones, transformers ignores the positions.
    """
    return "attention_mask" not in micro and starts_anew(micro)


def starts_anew(micro: Micro) -> bool:
    """True if positions `[B, T]` restart within a row."""
    return "position_ids" in micro and bool(document_starts(micro["position_ids"])[:, 1:].any())


def document_edges(position_ids: Tensor) -> Tensor:
    """The places where documents begin, in all rows `[B, T]` end to end, and the last one's end."""
    starts = document_starts(position_ids).flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=position_ids.numel())


def unpacked(micro: Micro) -> dict[str, Tensor]:
    """The documents of packed rows `[B, T]` as padded rows `[N, L]`, one each; all media."""
    lengths = document_edges(micro["position_ids"]).diff().tolist()

    def rows(values: Tensor, padding: int) -> Tensor:
        return pad_sequence(values.flatten().split(lengths), True, padding)

    alone = {
        name: value if of_media(name) else rows(value, IGNORED if name == "labels" else 0)
        for name, value in micro.items()
        if name != "position_ids"
    }
    return alone | {"attention_mask": rows(torch.ones_like(micro["input_ids"]), 0)}


def packed_positions(model: nn.Module, micro: Micro) -> Tensor:
    """The positions of packed rows for a model's forward: `[B, T]`, or `[4, B, T]`.

    Models that place images in time, height and width (M-RoPE) take the positions of text, which
    restart with documents, and three more: `get_rope_index` of each document alone.

    Raises InputError: the model has no positions for these documents.
    """
    places = micro["position_ids"]
    modules = (module for module in model.modules() if hasattr(module, "get_rope_index"))
    index: Any = getattr(next(modules, None), "get_rope_index", None)
    if index is None:
        return places
    if not any(map(of_media, micro)):
        return places.expand(4, -1, -1)
    alone, names = unpacked(micro), inspect.signature(index).parameters
    if "feature_attention_mask" in alone:  # Qwen-Omni's forward makes or renames these two
        alone["audio_seqlens"] = alone["feature_attention_mask"].sum(1)
    if "video_second_per_grid" in alone:
        alone["second_per_grids"] = alone["video_second_per_grid"]
    problem = "packed rows with images or sounds: the model has no positions for these documents"
    with explained(problem, "train them without packing (data.packing: false)"):
        of_media_3NL, _ = index(**{name: alone[name] for name in names if name in alone})
    of_media_3BT = of_media_3NL[:, alone["attention_mask"].bool()].view(-1, *places.shape)
    return torch.cat([places[None], of_media_3BT])


def length_arguments(position_ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Arguments of a forward: the edges of documents of rows `[B, T]`, and the longest's length.

    Layers are compiled once for any number of documents, but again for each length of the longest:
    the length is rounded up to a power of two, `_LEAST_LONGEST` at least.
    """
    edges = document_edges(position_ids).to(torch.int32)
    longest = max(1 << (int(edges.diff().max()) - 1).bit_length(), _LEAST_LONGEST)
    longest = min(longest, position_ids.shape[1])
    edges = edges.to(device)
    mark_dynamic(edges)
    return {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class DocumentCheck:
    """Tries if a model keeps the documents of packed rows separate."""

    def __init__(
        self,
        program: ModelProgram,
        run_trial: Callable[[list[Micro]], TrialRun],
        check_masks: Callable[[Sequence[Micro]], None],
    ) -> None:
        """Args: `check_masks` raises DoesNotFit if attention needs masks that do not fit."""
        config = program.spec.capture.model.config
        self._model_type, self._dtype = config.model_type, program.dtype
        self._program = program
        self._run_trial = run_trial
        self._check_masks = check_masks
        self._limits = limits_of(config)
        ids = re.findall(r"_token_(?:id|index)'?: (\d+)", str(config.to_dict()))
        self._placeholders = torch.tensor([*map(int, ids)], dtype=torch.long)
        self._passed: set[RowKind] = set()

    def check(self, micro_batches: Sequence[Micro], ranks: Ranks = ALONE) -> None:
        """Try packed rows of a kind that is new to some rank, on all ranks.

        Rows of one kind are single or several, have the same kinds of media, and their lengths lie
        between the same two integers of the configuration (windows, kernel sizes) or powers of two.

        Raises InputError: the model mixes documents; DoesNotFit: there is no memory for masks.
        """
        untried = self._untried(micro_batches, ranks)
        new = {self._kind(micro): micro for micro in reversed(untried)}
        if self._program.may_attend_by_lengths and not all(map(self._settle, new.values())):
            self._program.may_attend_by_lengths = False
            self._passed.clear()  # kinds that passed when attention was by lengths
            untried = self._untried(micro_batches, ranks)

        def checked() -> int:
            self._check_masks(micro_batches)
            return len(micro_batches)

        num_micro = max(ranks.agree(checked))  # micro-batches of one trial run
        for micro in untried:
            kind = self._kind(micro)
            if kind not in self._passed and self._keeps_apart(micro, num_micro):
                self._passed.add(kind)

    def _untried(self, micro_batches: Sequence[Micro], ranks: Ranks) -> list[Micro]:
        """The packed micro-batches of new kinds of all ranks."""

        def of_rank() -> list[Micro]:
            packed = filter(is_packed, micro_batches)
            return [m for m in packed if self._kind(m) not in self._passed and self._trials(m)]

        return [micro for micros in ranks.agree(of_rank) for micro in micros]

    def _kind(self, micro: Micro) -> RowKind:
        """The kind of a micro-batch's rows: see `check` and `RowKind`."""
        rows, tokens = micro["position_ids"].shape
        media = frozenset(filter(self._program.spec.capture.is_media, micro))
        if not media:
            return rows > 1, bisect(self._limits, tokens), media, False
        placed_BT = torch.isin(micro["input_ids"], self._placeholders)
        begins_BT = document_starts(micro["position_ids"])[:, 1:]
        touch = bool((begins_BT & placed_BT[:, 1:] & placed_BT[:, :-1]).any())
        return rows > 1, bisect(self._limits, tokens), media, touch

    def _trials(self, micro: Micro, seed: int = 0) -> list["Comparison"]:
        _, _, media, _ = self._kind(micro)
        if not media:
            return comparisons(micro, seed)
        accepts = self._program.spec.capture.accepts
        inputs = {name: micro[name] for name in micro if name == "labels" or accepts(name)}
        return [with_media(inputs, self._placeholders)]

    def _settle(self, micro: Micro) -> bool:
        """Attend by lengths from now on if losses then equal those by masks; True if so."""
        [*_, last_comparison] = self._trials(micro)
        trial = last_comparison.micro_batches[0]
        if not any(map(of_media, trial)):
            trial = {name: value[:1, :_COMPARED] for name, value in trial.items()}
        try:
            by_lengths = self._losses(trial, BY_LENGTHS)
        except DoesNotFit:
            raise
        except Exception as error:  # the model's own code may not take lengths
            _log.info("documents are kept apart by masks, not by their lengths: %s", error)
            is_equal = False
        else:
            by_masks = self._losses(trial, BY_MASKS)
            is_equal = change_of(by_masks, by_lengths) <= MOST_NOISE[self._dtype]
            is_equal = is_equal or self._is_as_alone(trial, by_lengths)
        self._program.attend(BY_LENGTHS if is_equal else BY_MASKS)
        return is_equal

    def _losses(self, trial: Micro, attention: str) -> Tensor:
        self._program.attend(attention)
        [losses_BT] = self._run_trial([trial]).losses
        return losses_BT.cpu()

    def _keeps_apart(self, micro: Micro, num_micro: int) -> bool:
        """True if documents are separate; False: the trial shows nothing. Raises InputError."""
        for seed in range(2):  # rounding may change the choice of experts once, hardly twice
            trials = self._trials(micro, seed)
            rows = [row for trial in trials for row in trial.micro_batches]
            groups = [rows[start : start + num_micro] for start in range(0, len(rows), num_micro)]
            losses = [loss.cpu() for group in groups for loss in self._run_trial(group).losses]
            if not all(bool(loss.isfinite().all()) for loss in losses):
                return False  # the step itself reports the error
            compared = zip(trials, losses[::2], losses[1::2], strict=True)
            changes = [trial.differences(plain, changed) for trial, plain, changed in compared]
            noise, leak, context = (max(values) for values in zip(*changes, strict=True))
            if noise > MOST_NOISE[self._dtype] or leak > TOLERANCE + NOISES * noise:
                continue
            if any(map(of_media, rows[0])) and not self._is_as_alone(rows[0], losses[0]):
                continue
            return context > LEAST_CONTEXT or micro["position_ids"].shape[1] < _SHORT
        raise InputError(_MIXED.format(self._model_type))

    def _is_as_alone(self, micro: Micro, losses_BT: Tensor) -> bool:
        """True if documents with media have the same losses as in rows of their own."""
        alone = unpacked(micro)
        [alone_NL] = self._run_trial([alone]).losses
        alone_N = alone_NL.cpu()[alone["attention_mask"].bool()]
        limit = TOLERANCE if self._dtype == torch.float32 else MOST_NOISE[self._dtype]
        return change_of(losses_BT.flatten(), alone_N) <= limit


def check_documents(spec: ModelSpec) -> None:
    """Raises InputError: states, convolutions, masks or positions of a model mix documents.

    This needs no data. `DocumentCheck` still tries the other models in their steps.
    """
    model = spec.capture.model
    if runs_on(model, (layer.module for layer in spec.layers)):
        raise InputError(_MIXED.format(model.config.model_type))
    program = ModelProgram(spec, torch.device("cpu"), torch.float32)
    program.attends_by_lengths = program.may_attend_by_lengths
    zeros = {name: torch.zeros(model.get_parameter(name).shape) for name in spec.kept}
    first, size = 6, 13  # tokens of the first document and of the row, no usual widths
    ids = torch.cat([torch.ones(1, first), torch.zeros(1, size - first)], 1).long()

    def run(inputs: dict[str, Tensor], documents: Mapping[str, Any]) -> tuple[MicroBatch, Uses]:
        """Run the prologue with weights of zeros."""
        ids, uses = inputs["input_ids"], Uses()
        rows = Rows(ids, torch.zeros_like(ids), {}, ids[0, :1])
        micro = MicroBatch(inputs, ids, rows, documents=documents)
        with Lookups({}, None, uses):
            program.prologue(zeros, micro)
        return micro, uses

    positions = torch.cat([torch.arange(first), torch.arange(size - first)])[None]
    lengths = length_arguments(positions, positions.device)
    positions = packed_positions(model, {"input_ids": ids, "position_ids": positions})
    micro, uses = run({"input_ids": ids, "position_ids": positions}, lengths)
    _, uses_alone = run({"input_ids": ids[:, first:]}, {})
    # The second document must look up the rows (of positions, of tokens before) that it does alone.
    for (_, rows), (_, rows_alone) in zip(uses.lookups, uses_alone.lookups, strict=False):
        if rows.numel() == size and not rows.flatten()[first:].equal(rows_alone.flatten()):
            raise InputError(_MIXED.format(model.config.model_type))
    leaves = [leaf for call in micro.calls for leaf in call.leaves if isinstance(leaf, Tensor)]
    entering = set(map(id, leaves))
    if not spec.capture.takes("position_ids") and id(positions) not in uses.touched | entering:
        raise InputError(_MIXED.format(model.config.model_type))
    if id(lengths["cu_seq_lens_q"]) in entering:
        return  # layers may keep documents apart by their lengths
    # Masks of bools are True for tokens that are seen; others are added to logits.
    masks = [leaf for leaf in leaves if leaf.ndim > 2 and leaf.shape[-2:] == (size, size)]
    visible = [mask if mask.dtype == torch.bool else mask > -1 for mask in masks]
    tells_layers = masks or id(positions) in entering  # where documents begin
    if not tells_layers or any(bool(is_seen[..., first:, :first].any()) for is_seen in visible):
        raise InputError(_MIXED.format(model.config.model_type))


@dataclass(frozen=True)
class Comparison:
    """Rows of documents, and the same rows with some tokens changed."""

    lengths: list[int]  # of the documents in each row, or in all rows end to end
    changed_T: Tensor  # True for the tokens of these documents that are changed
    micro_batches: list[Micro]  # the rows, and the rows with tokens changed

    def differences(self, plain_BT: Tensor, changed_BT: Tensor) -> tuple[float, float, float]:
        """Changes of the losses of `micro_batches`: root mean squares, divided by their spread.

        Of the most changed document before the changed tokens (noise), of the most changed one
        after them (a leak), and of the unchanged tokens of the same document (context).
        """
        change_BT = (plain_BT - changed_BT).reshape(-1, len(self.changed_T)) / spread_of(plain_BT)
        parts = (x.split(self.lengths, -1) for x in (change_BT, ~self.changed_T))
        before = after = within = 0.0
        is_after = False
        for change, is_unchanged_T in zip(*parts, strict=True):
            size = float(change[:, is_unchanged_T].square().mean().sqrt())
            if not is_unchanged_T.all():  # the document of the changed tokens
                is_after = True
                within = size if is_unchanged_T.any() else within
            elif is_after:
                after = max(after, size)
            else:
                before = max(before, size)
        return before, after, within


def comparisons(micro: Micro, seed: int = 0) -> list[Comparison]:
    """Comparisons of documents as long as those of a row, and of short ones between long ones."""
    rows, tokens = micro["position_ids"].shape
    shape = min(rows, 2), tokens
    pool = at_least_two(torch.unique(micro["input_ids"]))
    compared: list[Comparison] = []

    def add(lengths: list[int], changed: list[int]) -> None:
        """Change the first `changed[n]` tokens of document n."""
        generator = torch.Generator().manual_seed(seed)
        index_BT = torch.randint(len(pool), shape, generator=generator)
        other_BT = index_BT + torch.randint(1, len(pool), shape, generator=generator)
        places = [torch.arange(n) for n in lengths]
        changed_T = torch.cat([place < n for place, n in zip(places, changed, strict=True)])
        positions_BT = torch.cat(places).expand(shape).contiguous()
        micro_batches: list[Micro] = []
        for chosen_BT in (index_BT, torch.where(changed_T, other_BT % len(pool), index_BT)):
            ids_BT = pool[chosen_BT]
            labels_BT = ids_BT.masked_fill(positions_BT == 0, IGNORED)  # nothing predicts these
            micro_batches.append(
                {"input_ids": ids_BT, "labels": labels_BT, "position_ids": positions_BT}
            )
        compared.append(Comparison(lengths, changed_T, micro_batches))

    def every_second(lengths: list[int]) -> None:
        first = 1 if len(lengths) > 2 else 0  # a document must follow a changed one
        add(lengths, [n if number % 2 == first else 0 for number, n in enumerate(lengths)])

    # The row with most documents, of those in which some document has a second token to predict.
    begins_BT = document_starts(micro["position_ids"])[:, 1:]
    count_B = begins_BT.sum(1).where(~begins_BT.all(1), -1)
    begins_T = begins_BT[int(count_B.argmax())].nonzero()[:, 0] + 1
    lengths = [end - begin for begin, end in pairwise([0, *begins_T.tolist(), tokens])]
    if max(lengths) > 1:
        every_second(lengths)
    short, half = min(_SHORT, tokens // 4), tokens // 2
    if short:
        every_second([short, short, tokens - 2 * short])
        add([half, tokens - half], [0, (tokens - half) // 2])
    if 0 < 4 * short < half:
        every_second([short, half, short + 1, short, tokens - half - 3 * short - 1])
    return compared


def with_media(micro: Micro, placeholders: Tensor) -> Comparison:
    """The documents, and a copy with the learnt tokens at even positions changed.

    Only those of every second document are changed, unless these have none.
    Args: `placeholders`: ids of tokens that stand for media: they are not changed.
    """
    ids_BT = micro["input_ids"]
    places_BT = micro["position_ids"]
    labels_BT = micro["labels"].masked_fill(document_starts(places_BT), IGNORED)
    document_BT = document_starts(places_BT).flatten().cumsum(0).view_as(places_BT)  # from 1
    learnt_BT = (labels_BT != IGNORED) & ~torch.isin(ids_BT, placeholders)
    second_BT = learnt_BT & (document_BT % 2 == 0)
    changed_BT = (second_BT if second_BT.any() else learnt_BT) & (places_BT % 2 == 0)
    pool = at_least_two(torch.unique(ids_BT[learnt_BT]))
    next_BT = (torch.searchsorted(pool, ids_BT) + 1) % len(pool)
    rows: list[Micro] = []
    for chosen_BT in (ids_BT, torch.where(changed_BT, pool[next_BT], ids_BT)):
        labelled_BT = torch.where(labels_BT == IGNORED, IGNORED, chosen_BT)
        rows.append({**micro, "input_ids": chosen_BT, "labels": labelled_BT})
    return Comparison(document_edges(places_BT).diff().tolist(), changed_BT.flatten(), rows)


def at_least_two(pool: Tensor) -> Tensor:
    """The tokens of `pool`, and another token if there is only one."""
    if len(pool) > 1:
        return pool
    return torch.cat([pool, pool - 1 if int(pool) else pool + 1])


def spread_of(losses: Tensor) -> float:
    """The standard deviation of losses, without the 0 of tokens without a label."""
    counted = losses[losses != 0]
    return (float(counted.std(correction=0)) if len(counted) > 1 else 0.0) or 1.0


def change_of(losses: Tensor, others: Tensor) -> float:
    """The root mean square change of losses, divided by their spread."""
    return float((losses - others).square().mean().sqrt()) / spread_of(losses)


def limits_of(config: PreTrainedConfig) -> list[int]:
    """Row lengths at which a model may change: integers of its configuration, and powers of 2."""
    limits = {1 << exponent for exponent in range(1, 31)}
    text = config.to_json_string(use_diff=False)
    json.loads(text, parse_int=lambda number: limits.add(int(number)))
    return sorted(limits)


def check_masks(
    micro_batches: Sequence[Micro], config: Any, itemsize: int, free_bytes: int
) -> None:
    """Raises DoesNotFit: a mask `[B, 1, T, T]` is larger than the free memory.

    A row of one document without padding needs no mask: its attention is plainly causal.

    Args: `itemsize`: of the compute dtype, to which torch converts a mask of bools.
    """
    if attention_of(config) not in _WITH_MASKS:
        return
    for index, micro in enumerate(micro_batches):
        rows, tokens = micro["input_ids"].shape
        needed = rows * tokens**2 * (1 + itemsize)
        if needed <= free_bytes:
            continue
        # The conditions of transformers (masking_utils, `_ignore_causal_mask_sdpa`).
        window = getattr(config, "sliding_window", None)
        reason = None
        if "attention_mask" in micro and not bool(micro["attention_mask"].all()):
            reason = "padding"
        elif is_packed(micro):
            by_lengths = attention_of(config) in (BY_EAGER, BY_LENGTHS)
            reason = None if by_lengths else "several documents"
        elif isinstance(window, int) and tokens >= window and attention_of(config) != BY_WINDOWS:
            reason = f"a sliding window of {window}"
        if reason is not None:
            raise DoesNotFit(
                f"micro-batch {index} has rows of {tokens} tokens with {reason}: their mask takes "
                f"{gib(needed)}, {gib(free_bytes)} are free; use shorter rows, or one document each"
            )
