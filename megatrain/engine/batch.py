"""The micro-batches of one optimizer step, checked and brought to the device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.base.changed import changed
from megatrain.base.seeds import derived_seed
from megatrain.compat.torch import one_thread
from megatrain.device import available_bytes
from megatrain.errors import InputError
from megatrain.loss import CROSS_ENTROPY, IGNORED, JointLoss, Loss, TokenScore, targets_of
from megatrain.model import documents
from megatrain.model.capture import Rows
from megatrain.model.media import as_computed
from megatrain.model.micro_batch import Batch, MicroBatch, TrialRun
from megatrain.model.program import ModelProgram
from megatrain.model.sequence_share import WHOLE, LossInputs, RowTrial, SequenceShare
from megatrain.model.sizes import most_positions, most_tokens
from megatrain.parallel.distributed import ProcessGroups, Ranks, require_same
from megatrain.source.source import EngineSetup

MicroBatches = Sequence[Mapping[str, Tensor]]

_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint8)  # int64 holds them without loss


class Intake:
    """Checks micro-batches, tries the model on new kinds of rows, moves batches to the device."""

    def __init__(
        self,
        setup: EngineSetup,
        program: ModelProgram,
        rows_each: int,
        losses: Callable[[Batch], list[Tensor]],
    ) -> None:
        """Args:
        rows_each: rows of the embedding table that each of several ranks keeps.
        losses: computes the losses `[B, T]` of a batch's micro-batches.
        """
        config = setup.source.model.config
        self._setup, self._program, self._config = setup, program, config
        self._rows_each, self._losses = rows_each, losses
        self._steps = 0  # the steps before the next batch
        self._vocab_size = config.get_text_config(decoder=True).vocab_size
        self._num_labels = min(self._vocab_size, program.spec.num_logits)
        self._max_tokens, self._num_positions = most_tokens(config), most_positions(config)
        self.share = SequenceShare(setup.sequence_ranks)  # this rank's tokens of every row
        self._documents = documents.DocumentCheck(program, self._run_trial, self._check_masks)
        shares_rows = isinstance(setup.sequence_ranks, ProcessGroups)  # not so in a forecast
        self._row_trial = RowTrial(self.share, program, self._run_trial) if shares_rows else None

    def batch(self, micro_batches: MicroBatches, loss: Loss | None, steps: int) -> Batch:
        """Return the `prepared` batch of the step after `steps` steps; try new kinds of rows."""
        self._steps, micro_batches = steps, _as_int64(micro_batches)
        batch = self.prepared(micro_batches, loss, self.share)
        self._documents.check(micro_batches, self._setup.ranks)
        if self._row_trial is not None:
            self._row_trial.check(micro_batches)
        return batch

    @one_thread()
    def prepared(
        self, micro_batches: MicroBatches, loss: Loss | None, share: SequenceShare = WHOLE
    ) -> Batch:
        """Check CPU micro-batches and move them to the device; all ranks call this.

        Args:
            loss: micro-batches must have labels and the loss's inputs; None: they need neither.
            share: this rank's part of shared rows; then all ranks pass the same micro-batches.

        Raises InputError: some rank has no micro-batch, unknown keys, wrong shapes or types, ids
        outside the vocabulary, positions that the model does not have, or (with a loss) no position
        that has a target.
        """
        setup, ranks = self._setup, self._setup.ranks
        parts = ranks.agree(partial(self._checked_part, micro_batches, loss, share))
        require_same([{"checksum of the step's rows": str(part.checksum)} for part in parts])
        all_inputs = [inputs for part in parts for inputs in part.loss_inputs]
        normaliser = 0.0 if loss is None else loss.normaliser(*zip(*all_inputs, strict=True))
        if loss is not None and normaliser == 0:
            raise InputError(
                "no token of this step has a label; check the data's labels (all -100)"
            )
        ids_by_rank = [part.unique for part in parts]
        unique_U, own_slice = _by_owner(ids_by_rank, ranks.shards, self._rows_each)
        own_part, shares = parts[ranks.rank], [*map(share.micro, micro_batches)]
        if share.cuts_rows:  # parts of rows are padded, whole rows are not
            all_tokens = sum(micro["input_ids"].numel() for micro in micro_batches)
        else:
            all_tokens = sum(part.num_tokens for part in parts)
        most_micro = max(part.num for part in parts)
        if self._program.exchanges_tokens:  # all ranks need equally many micro-batches
            ids = torch.full_like(shares[0]["input_ids"][:1], int(own_part.unique[0]))
            padding = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
            shares.extend([padding] * (most_micro - own_part.num))
        on_device_U = unique_U.to(setup.device.torch_device)
        batch = Batch(
            [self._moved(micro, unique_U, on_device_U) for micro in shares],
            normaliser,
            own_part.num_tokens,
            unique_U,
            derived_seed(setup.seed, self._steps),
            before=sum(part.num for part in parts[: ranks.rank]),
            own=own_slice,
            all_tokens=all_tokens,
            most_micro=most_micro,
            idle=len(shares) - own_part.num,
            has_media=any(part.has_media for part in parts),
        )
        if loss is not None:
            is_joint = isinstance(loss, JointLoss)
            _give_loss(batch, loss, all_inputs if is_joint else own_part.loss_inputs)
        return batch

    def _checked_part(
        self, micro_batches: MicroBatches, loss: Loss | None, share: SequenceShare
    ) -> "_Part":
        """Check this rank's micro-batches; return the part of the step that all ranks are told."""
        if not isinstance(micro_batches, list | tuple) or not micro_batches:
            got = "none" if micro_batches == [] else f"a {type(micro_batches).__name__}"
            raise InputError(f"a step needs a list of at least one micro-batch; it got {got}")
        spec = self._program.spec
        has_media = False
        for index, micro in enumerate(micro_batches):
            text = _without_media(f"micro-batch {index}", micro, spec.capture.is_media)
            self._check(f"micro-batch {index}", text, loss)
            has_media |= text is not micro  # else there were no tensors to take out
        shift = spec.label_shift
        inputs = [] if loss is None else [_loss_inputs(m, loss, shift) for m in micro_batches]
        checksum = share.check(micro_batches, inputs, loss, self._max_tokens)
        shares = map(share.micro, micro_batches)
        ids = torch.cat([micro["input_ids"].reshape(-1) for micro in shares])
        # Some forwards embed token 0 where features then overwrite the embedding.
        constants = [*spec.constants, 0] if has_media else spec.constants
        unique = torch.unique(torch.cat([ids, torch.tensor(constants, dtype=ids.dtype)]))
        losses, num = share.loss_inputs(inputs), len(micro_batches)
        return _Part(losses, unique, num, len(ids), checksum, has_media)

    def _moved(
        self, micro: Mapping[str, Tensor], unique_U: Tensor, on_device_U: Tensor
    ) -> MicroBatch:
        """Move a micro-batch to the device, with its tokens' places among the step's rows."""
        device, capture = self._setup.device.torch_device, self._program.spec.capture
        inputs, media = {}, {}
        for key, value in micro.items():
            is_input = key == "input_ids" or capture.accepts(key)
            if not is_input or (key == "attention_mask" and self._drops_mask(micro)):
                continue
            moved = (value.clone() if value.is_inference() else value).to(device)
            if capture.is_media(key):
                media[key] = as_computed(moved, self._program.dtype)
            else:
                inputs[key] = moved
        mask = micro.get("attention_mask", torch.ones(1))
        counted_N = None if bool(mask.all()) else mask.flatten().float().to(device)
        index_BT = torch.searchsorted(on_device_U, inputs["input_ids"].contiguous())
        rows = Rows(inputs["input_ids"], index_BT, {}, unique_U)
        packed = documents.is_packed(micro)
        lengths = {}
        if packed:
            on_cpu = {key: micro[key] for key in [*inputs, *media]}
            positions = documents.packed_positions(capture.model, on_cpu)
            inputs["position_ids"] = positions.to(device)
            if self._program.may_attend_by_lengths:
                lengths = documents.length_arguments(micro["position_ids"], device)
        return MicroBatch(
            inputs,
            None,
            rows,
            documents=lengths,
            counted_N=counted_N,
            media=media,
            is_packed=packed if "position_ids" in inputs and not self.share.cuts_rows else None,
        )

    def _drops_mask(self, micro: Mapping[str, Tensor]) -> bool:
        """True if the result does not need a micro-batch's mask; without it attention is faster."""
        mask = micro["attention_mask"]
        all_padding = not bool(mask.any())  # no result of these rows is used
        # A mask of ones lets documents of packed rows see each other.
        is_plain = bool(mask.all()) and not documents.starts_anew(micro)
        is_plain &= self._program.spec.capture.of_transformers  # a user's own code may read masks
        return self.share.cuts_rows or all_padding or is_plain

    def _check(self, where: str, micro: Mapping[str, Tensor], loss: Loss | None) -> None:
        if not isinstance(micro, Mapping):
            kind = type(micro).__name__
            raise InputError(f"{where} is a {kind}; it must be a dictionary of tensors")
        needed = ["input_ids"]
        if loss is not None:
            needed += ["labels", *loss.inputs, *loss.choices]
        for key in needed:
            if key not in micro:
                raise InputError(f"{where} has no {key}")
        usable, accepts = {*needed, "labels"}, self._program.spec.capture.accepts
        if unknown := sorted(key for key in micro if key not in usable and not accepts(key)):
            raise InputError(
                f"{where} has {unknown[0]!r}, which neither the model's forward nor the loss "
                f"takes for tokens; give {', '.join(needed)}, and other inputs of the forward"
            )
        for key, value in micro.items():
            if not isinstance(value, Tensor):
                raise InputError(f"{where}: {key} is a {type(value).__name__}; it must be a tensor")
        shape = micro["input_ids"].shape
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"{where}: input_ids must be [rows, tokens], not {list(shape)}")
        for key in micro:
            _check_value(where, micro, key, loss)
        mask = micro.get("attention_mask", torch.ones(1))
        if len(wrong := mask[(mask != 0) & (mask != 1)]):
            raise InputError(
                f"{where}: attention_mask holds {int(wrong[0])}; 1 stands for a token, 0 hides it "
                "(documents of a row are kept apart by position_ids that start anew)"
            )
        _check_ids(f"{where}: input_ids", micro["input_ids"], self._vocab_size)
        if loss is not None:
            labels = micro["labels"]
            _check_ids(f"{where}: labels", labels[labels != IGNORED], self._num_labels)
            if (labels != IGNORED).any() and not mask.any():
                raise InputError(
                    f"{where}: attention_mask hides all tokens; 1 stands for one, 0 hides"
                )
            for name in loss.choices[:1]:
                _check_ids(f"{where}: {name}", micro[name], self._num_labels)
        tokens, most = shape[1], self._max_tokens
        if most is not None and tokens > most:
            raise InputError(
                f"{where} has rows of {tokens} tokens, but the model has {most} positions "
                "(max_position_embeddings); cut the rows"
            )
        positions = self._num_positions
        for position in map(int, micro.get("position_ids", torch.zeros(1)).aminmax()):
            if position < 0 or position >= (positions or inf):
                raise InputError(
                    f"{where}: position_ids holds {position}; positions start at 0, and the model "
                    f"has {positions or 'any number'} (max_position_embeddings)"
                )

    def _check_masks(self, micro_batches: MicroBatches) -> None:
        device = self._setup.device
        if device.can.counts_memory:
            text = self._config.get_text_config(decoder=True)
            itemsize = self._program.dtype.itemsize
            documents.check_masks(micro_batches, text, itemsize, available_bytes(device))

    def _run_trial(self, micro_batches: MicroBatches) -> TrialRun:
        self._program.train(False)
        loss = TokenScore() if self._program.spec.capture.task != "CAUSAL_LM" else CROSS_ENTROPY
        last = self._num_labels - 1  # a classifier's labels are classes, but here they are tokens
        micro_batches = [{**m, "labels": m["labels"].clamp(max=last)} for m in micro_batches]
        batch = self.prepared(micro_batches, loss)
        # Float8 is off: the tokens of a tensor share a scale, so each changes the others' results.
        unscaled = changed(self._program.scaled_together, __class__=nn.Linear)
        with self._program.eager(), unscaled:
            losses = [loss.cpu() for loss in self._losses(batch)]
        by_rank = self._setup.ranks.all_gather_object(losses)
        calls = [micro.calls for micro in batch.micro]
        return TrialRun(calls, by_rank[0])  # all ranks decide by the same losses


def _as_int64(micro_batches: Any) -> Any:
    """Convert tensors of narrower integers, and masks of truth values, to int64."""
    if not isinstance(micro_batches, list | tuple):
        return micro_batches

    def widened(name: str, value: Any) -> Any:
        narrow = (*_NARROW, torch.bool) if name == "attention_mask" else _NARROW
        return value.long() if isinstance(value, Tensor) and value.dtype in narrow else value

    return [
        {name: widened(name, v) for name, v in m.items()} if isinstance(m, Mapping) else m
        for m in micro_batches
    ]


def halved(
    micro_batches: MicroBatches, is_media: Callable[[str], bool] = lambda name: False
) -> list[Mapping[str, Tensor]]:
    """Split the rows of each micro-batch into two halves.

    A single row stays whole, and rows with images or sounds, whose tensors do not tell the rows.
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
    """The ids of all ranks in equally long blocks, one for each rank's rows; this rank's slice."""
    if len(ids) == 1:
        return ids[0], slice(None)
    unique_U = torch.unique(torch.cat(list(ids)))
    bounds = torch.arange(ranks.size + 1) * rows_each
    spans = [*pairwise(torch.searchsorted(unique_U, bounds).tolist())]
    longest = max(stop - start for start, stop in spans)
    blocks = []
    for start, stop in spans:
        filler = unique_U[stop - 1] if stop else torch.tensor(-1)  # keeps the ids in order
        blocks += [unique_U[start:stop], filler.expand(longest - (stop - start))]
    start, stop = spans[ranks.rank]
    first = ranks.rank * longest
    return torch.cat(blocks), slice(first, first + stop - start)


def _check_value(where: str, micro: Mapping[str, Tensor], key: str, loss: Loss | None) -> None:
    """Check the shape, type and device of a tensor with a value for each token.

    A loss's inputs `[B, T]` hold numbers; its choices `[B, T, K]` hold token ids, then numbers.
    """
    inputs, choices = ((), ()) if loss is None else (loss.inputs, loss.choices)
    value, shape = micro[key], [*micro["input_ids"].shape]
    if key in choices:
        ids_shape = micro[choices[0]].shape
        shape.append(max(1, ids_shape[2]) if len(ids_shape) > 2 else 1)  # K of the ids
    is_number = key in inputs or key in choices[1:]
    has_type = value.is_floating_point() if is_number else value.dtype == torch.int64
    if [*value.shape] != shape or not has_type or value.device.type != "cpu":
        kind = "of floating-point numbers" if is_number else "of integers"
        raise InputError(
            f"{where}: {key} is {list(value.shape)} {value.dtype} on {value.device}; it must "
            f"be {shape} {kind} on the cpu"
        )
    if is_number and not bool(value.isfinite().all()):
        raise InputError(f"{where}: {key} holds a number that is not finite")


def _give_loss(batch: Batch, loss: Loss, inputs: Iterable[LossInputs]) -> None:
    """Put a loss's targets and inputs into the batch and its micro-batches.

    Args: `inputs`: of this rank's micro-batches; with a joint loss of all ranks' micro-batches.
    """
    device = batch.micro[0].rows.ids.device
    for targets, extras in inputs:
        batch.loss_inputs.append((targets.to(device), [extra.to(device) for extra in extras]))
    first = batch.before if isinstance(loss, JointLoss) else 0
    num_filled = len(batch.micro) - batch.idle
    for micro, (targets, extras) in zip(
        batch.micro[:num_filled], batch.loss_inputs[first : first + num_filled], strict=True
    ):
        micro.targets, micro.loss, micro.extras = targets, loss, extras
    for micro in batch.micro[num_filled:]:
        micro.targets, micro.loss = torch.full_like(micro.rows.ids, IGNORED), loss
        shape, (_, extras) = micro.targets.shape, batch.loss_inputs[0]
        micro.extras = [extra.new_zeros(*shape, *extra.shape[2:]) for extra in extras]


class _Part(NamedTuple):
    """One rank's part of a step: targets and inputs of the loss, distinct ids, and counts."""

    loss_inputs: list[LossInputs]
    unique: Tensor
    num: int  # micro-batches
    num_tokens: int
    checksum: int
    has_media: bool


def _loss_inputs(micro: Mapping[str, Tensor], loss: Loss, shift: int) -> LossInputs:
    ids = loss.choices[:1]  # all other inputs are numbers
    inputs = [(name, micro[name]) for name in (*loss.inputs, *loss.choices)]
    extras = [targets_of(t if name in ids else t.float(), shift, 0) for name, t in inputs]
    return targets_of(micro["labels"], shift), extras


def _without_media(where: str, micro: Any, is_media: Callable[[str], bool]) -> Any:
    """Return a micro-batch without its tensors of images and sounds, each of which is checked."""
    media = [key for key in micro if is_media(key)] if isinstance(micro, Mapping) else []
    for key in media:
        value = micro[key]
        is_on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        # `aminmax` makes no copy of gigabytes of pixels, and returns NaN if there is a NaN.
        has_values = is_on_cpu and value.numel() > 0
        if not has_values or not all(map(isfinite, map(float, value.aminmax()))):
            raise InputError(
                f"{where}: {key} must be a tensor of finite numbers on the cpu, and not empty"
            )
    return {key: micro[key] for key in micro if key not in media} if media else micro


def _check_ids(where: str, ids: Tensor, vocab_size: int) -> None:
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        raise InputError(
            f"{where} holds token {int(unknown[0])}, outside the model's vocabulary (or classes) "
            f"of {vocab_size}; use the model's own tokenizer (or more num_labels)"
        )
