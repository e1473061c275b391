"""The micro-batches of one optimizer step, checked and brought to the device."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.base.seeds import derived_seed
from megatrain.device import available_bytes
from megatrain.errors import InputError
from megatrain.loss import CROSS_ENTROPY, IGNORED, TOKEN_SCORE, JointLoss, Loss, targets_of
from megatrain.model.capture import Call, Rows
from megatrain.model.document_check import DocumentCheck, check_masks
from megatrain.model.documents import is_packed, length_arguments, packed_positions, starts_anew
from megatrain.model.float8 import in_own_type
from megatrain.model.media import as_computed
from megatrain.model.micro_batch import Batch, MicroBatch
from megatrain.model.program import ModelProgram
from megatrain.model.sequence_share import WHOLE, Judged, RowTrial, SequenceShare
from megatrain.model.sizes import most_tokens
from megatrain.parallel.distributed import ProcessGroups, Ranks, require_same
from megatrain.source.source import EngineSetup

MicroBatches = Sequence[Mapping[str, Tensor]]

# Integers that int64 holds without loss.
_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint8)


class Intake:
    """Checks an engine's micro-batches, tests new kinds of rows on the model, moves them to device.

    Attributes:
        share: this rank's tokens of every row.
    """

    def __init__(
        self,
        setup: EngineSetup,
        program: ModelProgram,
        rows_each: int,
        losses: Callable[[Batch], list[Tensor]],
    ) -> None:
        """Args:
        rows_each: rows of the table that each of several ranks keeps.
        losses: computes a batch's losses `[B, T]`.
        """
        config = setup.source.model.config
        self._setup, self._program, self._config = setup, program, config
        self._rows_each, self._losses, self._steps = rows_each, losses, 0
        self._vocab_size = config.get_text_config(decoder=True).vocab_size
        self._labels = min(self._vocab_size, program.spec.num_logits)
        self._max_tokens = most_tokens(config)
        self.share = SequenceShare(setup.sequence_ranks)
        self._documents = DocumentCheck(program, self._run_trial, self._check_masks)
        shares = isinstance(setup.sequence_ranks, ProcessGroups)  # those of a forecast only count
        self._row_trial = RowTrial(self.share, program, self._run_trial) if shares else None

    def batch(self, micro_batches: MicroBatches, loss: Loss | None, steps: int) -> Batch:
        """The batch of the step that follows `steps` steps; see `prepared`."""
        self._steps, micro_batches = steps, _as_int64(micro_batches)
        batch = self.prepared(micro_batches, loss, self.share)
        self._documents.check(micro_batches, self._setup.ranks)
        if self._row_trial is not None:
            self._row_trial.check(micro_batches)
        return batch

    def prepared(
        self, micro_batches: MicroBatches, loss: Loss | None, share: SequenceShare = WHOLE
    ) -> Batch:
        """Check CPU micro-batches and move them to the device; all ranks call this.

        Args:
            loss: micro-batches must have labels and the loss's inputs; None: they need neither.
            share: this rank's part of shared rows; then all ranks pass the same micro-batches.

        Raises InputError: of any rank: no micro-batch, unknown keys, wrong shapes or types, ids
        outside the vocabulary, positions that the model does not have, or (with a loss) no position
        that has a target.
        """
        spec, setup = self._program.spec, self._setup
        ranks, device = setup.ranks, setup.device.torch_device
        shares: list[Mapping[str, Tensor]] = []
        has_media: list[bool] = []

        def check_and_share() -> _Part:
            if not isinstance(micro_batches, list | tuple) or not micro_batches:
                got = "none" if micro_batches == [] else f"a {type(micro_batches).__name__}"
                raise InputError(f"a step needs a list of at least one micro-batch; it got {got}")
            for index, micro in enumerate(micro_batches):
                text = _without_media(f"micro-batch {index}", micro, spec.capture.is_media)
                self._check(f"micro-batch {index}", text, loss)
                has_media.append(text is not micro)
            shift = spec.label_shift
            losses = [] if loss is None else [_loss_inputs(m, loss, shift) for m in micro_batches]
            checksum = share.check(micro_batches, losses, loss, self._max_tokens)
            shares[:] = [share.micro(micro) for micro in micro_batches]
            ids = torch.cat([micro["input_ids"].reshape(-1) for micro in shares])
            # Some forwards embed token 0 in the place of what features then overwrite.
            others = [*spec.constants, 0] if any(has_media) else spec.constants
            unique = torch.unique(torch.cat([ids, torch.tensor(others, dtype=ids.dtype)]))
            targets = share.judged(losses)
            return _Part(targets, unique, len(shares), len(ids), checksum, any(has_media))

        parts = ranks.agree(check_and_share)
        require_same([{"checksum of the step's rows": str(part.checksum)} for part in parts])
        losses = [inputs for part in parts for inputs in part.losses]
        normaliser = 0.0 if loss is None else loss.normaliser(*zip(*losses, strict=True))
        if loss is not None and normaliser == 0:
            raise InputError(
                "no token of this step has a label; check the data's labels (all -100)"
            )
        unique_U, own = _by_owner([part.unique for part in parts], ranks.shards, self._rows_each)
        mine, all_tokens = parts[ranks.rank], sum(part.num_tokens for part in parts)
        if share.cuts_rows:  # without what fills them up
            all_tokens = sum(micro["input_ids"].numel() for micro in micro_batches)
        most = max(part.num for part in parts)
        if self._program.exchanges:  # equally often on all ranks: rows that count nothing follow
            ids = torch.full_like(shares[0]["input_ids"][:1], int(mine.unique[0]))
            empty = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
            shares.extend([empty] * (most - mine.num))
        batch = Batch(
            [self._moved(micro, unique_U) for micro in shares],
            normaliser,
            mine.num_tokens,
            unique_U,
            derived_seed(setup.seed, self._steps),
            before=sum(part.num for part in parts[: ranks.rank]),
            own=own,
            all_tokens=all_tokens,
            most=most,
            idle=len(shares) - mine.num,
            has_media=any(part.has_media for part in parts),
        )
        if loss is not None:
            joint = isinstance(loss, JointLoss)
            for targets, extras in losses if joint else mine.losses:
                batch.loss_inputs.append((targets.to(device), [e.to(device) for e in extras]))
            local = batch.loss_inputs[batch.before if joint else 0 :]
            for micro, (targets, extras) in zip(batch.micro, local, strict=False):
                micro.targets, micro.loss, micro.extras = targets, loss, extras
            for micro in batch.micro[mine.num :]:
                micro.targets, micro.loss = torch.full_like(micro.rows.ids, IGNORED), loss
                shape, beside = micro.targets.shape, batch.loss_inputs[0][1]
                micro.extras = [extra.new_zeros(*shape, *extra.shape[2:]) for extra in beside]
        return batch

    def _moved(self, micro: Mapping[str, Tensor], unique_U: Tensor) -> MicroBatch:
        # Without a mask transformers takes the fast causal path. A mask of ones says that documents
        # see each other, else nothing; of zeros (rows that stand for none) nothing can be right.
        device, capture = self._setup.device.torch_device, self._program.spec.capture
        mask = micro.get("attention_mask", torch.ones(1))
        plain = (bool(mask.all()) and not starts_anew(micro)) or not bool(mask.any())
        plain |= self.share.cuts_rows
        inputs = {
            key: (micro[key].clone() if micro[key].is_inference() else micro[key]).to(device)
            for key in micro
            if (key == "input_ids" or capture.accepts(key))
            and not (key == "attention_mask" and plain)
        }
        media = {
            key: as_computed(inputs.pop(key), self._program.dtype)
            for key in [*inputs]
            if capture.is_media(key)
        }
        counted_N = None if bool(mask.all()) else mask.flatten().float().to(device)
        index_BT = torch.searchsorted(unique_U, micro["input_ids"].contiguous())
        rows = Rows(inputs["input_ids"], index_BT.to(device), {}, unique_U)
        documents = {}
        if is_packed(micro):
            places, taken = micro["position_ids"], {key: micro[key] for key in [*inputs, *media]}
            inputs["position_ids"] = packed_positions(capture.model, taken).to(device)
            by_lengths = self._program.may_attend_by_lengths
            documents = length_arguments(places, device) if by_lengths else {}
        return MicroBatch(inputs, None, rows, documents=documents, counted_N=counted_N, media=media)

    def _check(self, where: str, micro: Mapping[str, Tensor], loss: Loss | None) -> None:
        if not isinstance(micro, Mapping):
            kind = type(micro).__name__
            raise InputError(f"{where} is a {kind}; it must be a dictionary of tensors")
        taken = () if loss is None else (*loss.inputs, *loss.choices)
        needed = ["input_ids", *(() if loss is None else ("labels", *taken))]
        for key in needed:
            if key not in micro:
                raise InputError(f"{where} has no {key}")
        known, accepts = {*needed, "labels"}, self._program.spec.capture.accepts
        if unknown := sorted(key for key in micro if key not in known and not accepts(key)):
            raise InputError(
                f"{where} has {unknown[0]!r}, which neither the model's forward nor the loss "
                f"takes for tokens; give {', '.join(needed)} (labels of -100 do not count), and "
                "further values of each token that the forward takes"
            )
        for key, value in micro.items():
            if not isinstance(value, Tensor):
                raise InputError(f"{where}: {key} is a {type(value).__name__}; it must be a tensor")
        shape = micro["input_ids"].shape
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"{where}: input_ids must be [rows, tokens], not {list(shape)}")
        for key, value in micro.items():
            numbers, sized = key in taken, [*shape]
            if loss is not None and key in loss.choices:
                numbers = key != (ids := loss.choices[0])
                sized.append(max([1, *micro[ids].shape[2:3]]))  # K, which all of them have
            typed = value.is_floating_point() if numbers else value.dtype == torch.int64
            if [*value.shape] != sized or not typed or value.device.type != "cpu":
                wanted = "of floating-point numbers" if numbers else "of integers"
                raise InputError(
                    f"{where}: {key} is {list(value.shape)} {value.dtype} on {value.device}; it "
                    f"must be {sized} {wanted} on the cpu"
                )
            if numbers and not bool(value.isfinite().all()):
                raise InputError(f"{where}: {key} holds a number that is not finite")
        _check_ids(f"{where}: input_ids", micro["input_ids"], self._vocab_size)
        if loss is not None:
            labels = micro["labels"]
            _check_ids(f"{where}: labels", labels[labels != IGNORED], self._labels)
            if (labels != IGNORED).any() and not micro.get("attention_mask", torch.ones(1)).any():
                raise InputError(
                    f"{where}: attention_mask hides all tokens; 1 stands for one, 0 hides"
                )
            for name in loss.choices[:1]:
                _check_ids(f"{where}: {name}", micro[name], self._labels)
        _check_positions(where, micro, self._max_tokens)

    def _check_masks(self, micro_batches: MicroBatches) -> None:
        device = self._setup.device
        if device.can.counts_memory:
            text = self._config.get_text_config(decoder=True)
            itemsize = self._program.dtype.itemsize
            check_masks(micro_batches, text, itemsize, available_bytes(device))

    def _run_trial(self, micro_batches: MicroBatches) -> tuple[list[Sequence[Call]], list[Tensor]]:
        self._program.train(False)
        loss = TOKEN_SCORE if self._program.spec.capture.classifies else CROSS_ENTROPY
        last = self._labels - 1  # of classes, for which token ids stand here
        micro_batches = [{**m, "labels": m["labels"].clamp(max=last)} for m in micro_batches]
        batch = self.prepared(micro_batches, loss)
        with self._program.eager(), in_own_type(self._program.scaled_together):
            losses = [loss.cpu() for loss in self._losses(batch)]
        by_rank = self._setup.ranks.all_gather_object(losses)
        return [micro.calls for micro in batch.micro], by_rank[0]  # so that all ranks decide alike


def _as_int64(micro_batches: Any) -> Any:
    """The micro-batches with narrow integers, and masks of truth values, as int64."""
    if not isinstance(micro_batches, list | tuple):
        return micro_batches

    def widened(name: str, value: Any) -> Any:
        narrow = (*_NARROW, torch.bool) if name == "attention_mask" else _NARROW
        return value.long() if isinstance(value, Tensor) and value.dtype in narrow else value

    return [
        {name: widened(name, v) for name, v in each.items()} if isinstance(each, Mapping) else each
        for each in micro_batches
    ]


def halved(
    micro_batches: MicroBatches, is_media: Callable[[str], bool] = lambda name: False
) -> list[Mapping[str, Tensor]]:
    """Split the rows of each micro-batch into two halves; a single row stays as it is.

    So do rows with images or sounds, whose tensors do not say which row they are of.
    """
    parts: list[Mapping[str, Tensor]] = []
    for micro in micro_batches:
        rows = len(micro["input_ids"])
        half = -(-rows // 2)
        if half == rows or any(map(is_media, micro)):
            parts.append(micro)
        else:
            cuts = slice(half), slice(half, rows)
            parts += [{name: value[cut] for name, value in micro.items()} for cut in cuts]
    return parts


def _by_owner(ids: Sequence[Tensor], ranks: Ranks, rows_each: int) -> tuple[Tensor, slice]:
    """All ranks' ids, ascending, in equal blocks by the rank that keeps them; this rank's slice."""
    if len(ids) == 1:
        return ids[0], slice(None)
    every_U = torch.unique(torch.cat(list(ids)))
    bounds = torch.arange(ranks.size + 1) * rows_each
    places = torch.searchsorted(every_U, bounds).tolist()
    block = max(stop - start for start, stop in pairwise(places))
    kept = [
        torch.cat([every_U[start:stop], last.expand(block - (stop - start))])
        for start, stop in pairwise(places)
        for last in [every_U[stop - 1] if stop else torch.tensor(-1)]
    ]
    start, stop = places[ranks.rank : ranks.rank + 2]
    return torch.cat(kept), slice(ranks.rank * block, ranks.rank * block + stop - start)


class _Part(NamedTuple):
    losses: list[Judged]
    unique: Tensor
    num: int
    num_tokens: int
    checksum: int
    has_media: bool


def _loss_inputs(micro: Mapping[str, Tensor], loss: Loss, shift: int) -> Judged:
    ids = loss.choices[:1]  # all others are numbers
    taken = [(name, micro[name]) for name in (*loss.inputs, *loss.choices)]
    extras = [targets_of(t if name in ids else t.float(), shift, 0) for name, t in taken]
    return targets_of(micro["labels"], shift), extras


def _without_media(where: str, micro: Any, is_media: Callable[[str], bool]) -> Any:
    """The tensors of a micro-batch that describe text; the micro-batch itself if all do."""
    media = [key for key in micro if is_media(key)] if isinstance(micro, Mapping) else []
    for key in media:
        value = micro[key]
        fits = isinstance(value, Tensor) and value.device.type == "cpu" and value.numel()
        # One pass over gigabytes of pixels, without a copy: the extremes of a NaN are NaN.
        if not fits or not all(map(isfinite, map(float, value.aminmax()))):
            raise InputError(
                f"{where}: {key} must be a tensor of finite numbers on the cpu, and not empty"
            )
    return {key: micro[key] for key in micro if key not in media} if media else micro


def _check_positions(where: str, micro: Mapping[str, Tensor], max_tokens: int | None) -> None:
    tokens = micro["input_ids"].shape[1]
    if max_tokens is not None and tokens > max_tokens:
        raise InputError(
            f"{where} has rows of {tokens} tokens, but the model has {max_tokens} positions "
            "(max_position_embeddings); cut the rows"
        )
    for place in map(int, micro.get("position_ids", torch.zeros(1)).aminmax()):
        if place < 0 or place >= (max_tokens or inf):
            raise InputError(
                f"{where}: position_ids holds {place}; positions start at 0, and the model has "
                f"{max_tokens or 'any number'} (max_position_embeddings)"
            )


def _check_ids(where: str, ids: Tensor, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InputError(
            f"{where} holds token {int(outside[0])}, outside the model's vocabulary (or classes) "
            f"of {vocab_size}; use the model's own tokenizer (or more num_labels)"
        )
