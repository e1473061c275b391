"""An engine whose placement is settled: it trains, evaluates, generates, exports and saves."""

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from megatrain.base.changed import changed
from megatrain.checkpoint import Contents, Saver, Saving, as_json, require_replaceable
from megatrain.compat.torch import has_saved_tensor_hooks, importing_compiler
from megatrain.engine.assemble import Assembly, host_bytes
from megatrain.engine.batch import Intake, MicroBatches, halved
from megatrain.engine.expert_loads import ExpertLoads
from megatrain.engine.head import Head
from megatrain.engine.step import Finish, Parts, Result, TrainingParts, forward_only, train_step
from megatrain.engine.undisturbed import plain_tensors, undisturbed
from megatrain.engine.update import StepResult
from megatrain.engine.whole_model import whole_model
from megatrain.errors import DoesNotFit, InputError, RunFailed
from megatrain.loss import CROSS_ENTROPY, JointLoss, Loss, as_numbers
from megatrain.model.adapters import Values, require_held
from megatrain.model.micro_batch import Batch
from megatrain.model.owned_experts import ExpertOwners
from megatrain.model.program import ModelProgram
from megatrain.optim import StreamedOptimizer, is_number
from megatrain.parallel.distributed import ALONE, Ranks, exchanging
from megatrain.placement import RECOMPUTE, Placement, Planned, Verify
from megatrain.source.load_weights import load_weights
from megatrain.source.sharing import NO_LABELS, check_call, check_shared, require_alone
from megatrain.source.source import EngineSetup
from megatrain.source.write_model import settings_of, write_documents, write_model
from megatrain.store.store import Store
from megatrain.telemetry.timeline import Span

_log = logging.getLogger(__name__)

_COMPUTED_AGAIN = (
    "step %d: %s; it is computed again, and from now on micro-batches are taken in halves by rows "
    "and layers save nothing for the backward"
)

_TOO_LARGE = (
    "A step of %d tokens, %d in its largest micro-batch, is larger than the placement was chosen "
    "for (%d, %d); give the engine the largest tokens_per_step (of all ranks) and micro_batch"
)
_MEDIA_UNPLANNED = (
    "A step has images or sounds, for which the placement leaves no room; give the engine a row "
    "with as many as any will have, as media="
)
_TORN = "a step was broken off when updates had begun"

# Attributes that hold memory; `close` deletes them.
_BUILT = ("_parts", "_store", "_saver", "_program", "_policies", "_intake", "_checks", "_loads")


class PlacedEngine:
    """Trains a causal language model, or runs it, in a placement that is settled.

    The attributes are those of `megatrain.Engine`, except for `micro_batch`.
    """

    loss: Loss = CROSS_ENTROPY

    def __init__(self, opened: EngineSetup, placement: Placement, planned: Planned | None) -> None:
        """Load the weights into their planes, and build the parts of a step.

        After an error no threads, pinned memory or disk file are left. `planned`: the step that the
        placement was chosen for; None: any.

        Raises DoesNotFit: there is not enough memory; InputError: the placement has choices that
        are impossible with this model.
        """
        self._opened, self._spec, self._dtype = opened, opened.model.spec, opened.dtype
        self.device, self.placement = opened.device, placement
        self.config: PreTrainedConfig = opened.source.model.config
        self.optimizer: StreamedOptimizer | None = opened.model.optimizer
        self._steps, self.label_shift = 0, self._spec.label_shift
        self._running = False  # True during a call that excludes others
        self.num_logits = self._spec.num_logits
        self._saves_memory = False  # True after memory ran out: half micro-batches, nothing saved
        self._planned, self._warned = planned, False
        self.ranks = opened.ranks
        self.batch_ranks: Ranks = ALONE if opened.sequence_ranks.size > 1 else opened.ranks
        self.vocab_size = int(self.config.get_text_config(decoder=True).vocab_size)
        self.balances_experts = self._spec.balances
        self.counts_experts = bool(self._spec.routed)
        try:
            check_shared(opened, placement)
            self._build(opened, placement)
        except BaseException:
            self.device.close()
            if "_store" in vars(self):
                self._store.close()
            raise

    def _build(self, opened: EngineSetup, placement: Placement) -> None:
        """Allocate planes and load weights, then build the model's program and a step's parts."""
        layouts = opened.model.placed(placement).layouts
        self._store = Store(
            self.device,
            layouts,
            self._dtype,
            rule=opened.model.rule,
            placement=placement,
            open_file=opened.open_file,
            rank=self.ranks.shards.rank,
        )
        self.num_parameters = sum(layout.num_parameters for layout in layouts)
        self.num_trained = sum(entry.numel for layout in layouts for entry in layout.trainable)
        self.computing = opened.model.computing
        # Saves read tiles in the order of updates: without clipping that of the backward.
        self._saver = Saver(
            self.device,
            self._store.tiles,
            placement.save_bytes,
            opened.host_limit,
            reverse=opened.max_grad_norm is None,
            ranks=self.ranks,
        )
        importing = importing_compiler() if placement.compile else nullcontext()
        with importing, self._undisturbed():
            load_weights(opened, self._store)
        if opened.source.saved is not None and opened.source.resumes:
            settings = opened.source.saved.settings
            self._steps = settings.steps
            if self.optimizer is not None:
                self.optimizer.restore(settings.groups, settings.num_steps)
        # The weights are loaded: drop the model or checkpoint that they came from.
        self._opened = replace(opened, source=replace(opened.source, in_memory=None, saved=None))
        self._program = ModelProgram(
            self._spec, self.device.torch_device, self._dtype, float8=opened.precision == "fp8"
        )
        self._program.tile_epilogue(placement.head_tokens)
        if placement.own_experts and self.ranks.size > 1:
            exchanges = exchanging(self.ranks, self.device.torch_device)
            self._program.set_owners(ExpertOwners(exchanges))
        verify: Verify = opened.verify if self.optimizer is not None else "off"
        assembly = Assembly(
            self.device, self._program, self._store, self._dtype, placement, self.ranks, verify
        )
        self._checks = assembly.checks
        self._checks.seal()
        self._parts: Parts = (
            assembly.inference()
            if self.optimizer is None
            else assembly.training(self.optimizer, opened.max_grad_norm)
        )
        self._policies = assembly.policies
        buffers = self._opened.source.untrained.buffers
        self._loads = ExpertLoads(self.device, self._spec, buffers)
        rows_each = self._parts.embedding.rows_each
        losses = partial(self._forward_only, finish=Head.losses)
        self._intake = Intake(opened, self._program, rows_each, losses)

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm that gradients are clipped to; None: they are not clipped.

        A new norm holds for the next steps. Setting it raises InputError if clipping would begin or
        end, because clipping decides when updates are done.
        """
        return self._opened.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        old = self._opened.max_grad_norm
        if norm == old:
            return
        is_valid = is_number(norm) and 0 < norm < inf
        if old is None or not is_valid or not isinstance(self._parts, TrainingParts):
            raise InputError(
                f"max_grad_norm is {old}, and cannot become {norm!r} while the engine is open; "
                "make the engine with it"
            )
        self._opened = replace(self._opened, max_grad_norm=norm)
        self._parts.update.max_grad_norm = norm

    def step(
        self,
        micro_batches: MicroBatches,
        loss: Loss | None = None,
        *,
        norm_limit: float = inf,
        router_shares: Sequence[float] | None = None,
        expected: tuple[float, float] | None = None,
    ) -> StepResult:
        """Take one optimizer step over all `micro_batches`, those of all ranks together.

        Args:
            micro_batches: dictionaries of CPU tensors of integers `[B, T]`: `input_ids`, `labels`
                (-100: none; shifted by `label_shift`), and optionally `attention_mask` (1: token,
                0: padding; or truth values), `position_ids`, other inputs of the model's forward
                with a value for each token, and floating-point inputs of the loss. B and T may
                differ. For a multimodal model also its processor's tensors of images, video and
                sound, in any shape.
            loss: one of `megatrain.loss`; None: the one that the engine was made for.
            norm_limit: refuse the step if its gradient norm is above this; needs `max_grad_norm`.
            router_shares: a factor for each micro-batch, whose routers' loss is then computed
                alone (with one rank only). None: it is computed over all tokens of the step.
            expected: loss and gradient norm of this step when it was computed before, from the same
                state (`StepRefused.measured`). RunFailed if they differ: the hardware has a fault.

        Raises:
            InputError: bad micro-batches, bad settings of the optimizer, or no optimizer.
            StepRefused: loss or gradient norm is not finite, or the norm above the limit; says
                whether a weight has been changed (never, with `max_grad_norm`).
            RunFailed: a host thread failed.
        """
        if not isinstance(self._parts, TrainingParts) or self.optimizer is None:
            raise InputError("this engine has no optimizer; make it with optimizer=AdamW(...)")
        if has_saved_tensor_hooks():
            raise InputError(
                "a step runs within torch.autograd.graph.saved_tensors_hooks or save_on_cpu, but "
                "the engine saves tensors itself, as the placement says; call step outside of them"
            )
        if norm_limit < inf and not self._parts.update.deferred:
            raise InputError("norm_limit needs max_grad_norm, and with Muon clip='all'")
        loss = self.loss if loss is None else loss
        start = time.perf_counter()
        loss_and_norm = None
        with self._exclusive():
            if self._saves_memory and router_shares is None:  # halves have other router losses
                micro_batches = halved(micro_batches, self._spec.capture.is_media)
            batch = self._prepare(micro_batches, loss, [self.max_grad_norm, norm_limit, expected])
            if router_shares is not None:
                require_alone(self.ranks, "a loss of routers of each micro-batch")
            batch.router_shares = router_shares
            self._parts.update.norm_limit, self._parts.update.expected = norm_limit, expected
            try:
                loss_and_norm = self._train(self._parts, batch, loss)
                self._steps += 1
                self.optimizer.took_step()
                self._parts.update.end()
            except DoesNotFit as error:
                if router_shares is not None or not self._can_save_memory(self._parts, batch):
                    raise
                _log.warning(_COMPUTED_AGAIN, self._steps + 1, str(error).partition(";")[0])
        if loss_and_norm is not None:
            seconds = time.perf_counter() - start
            measures = as_numbers(batch.measured)
            experts = self._loads.after_step(batch.loads)
            return StepResult(*loss_and_norm, batch.all_tokens, seconds, measures, experts)
        self._saves_memory = True  # memory ran out: compute the step again with less
        del batch
        self._parts.kept.release()
        gc.collect()  # frames of the failure may hold tensors of the device
        return self.step(micro_batches, loss, norm_limit=norm_limit, expected=expected)

    def _train(self, parts: TrainingParts, batch: Batch, loss: Loss) -> tuple[float, float]:
        """Take a step; return its loss and gradient norm."""
        saves = self._is_planned(batch) and not self._saves_memory
        # A loss over all micro-batches takes one pass, in which their graphs need too much memory.
        one_pass = parts.passes > 1 and (isinstance(loss, JointLoss) or self._spec.balances)
        with self._undisturbed():
            for encoders in parts.trunk_with_media[:1]:  # the first unit, if the model has encoders
                if not batch.has_media and encoders.trained:
                    parts.sink.leave_out(encoders.tile)
            policies = self._policies(device=saves and not one_pass, host=saves)
            parts = parts.for_batch(batch).with_policies(policies)
            return train_step(replace(parts, passes=1) if one_pass else parts, batch)

    def _is_planned(self, batch: Batch) -> bool:
        """True if the placement has room for this step; else warn once that nothing is saved."""
        planned = self._planned
        if planned is None:
            return True
        tokens = batch.num_tokens
        largest = max(micro.inputs["input_ids"].numel() for micro in batch.micro)
        unplanned = ""
        if batch.has_media and not planned.has_media:
            unplanned = _MEDIA_UNPLANNED
        elif tokens > planned.tokens_per_step or largest > planned.micro_batch_tokens:
            unplanned = _TOO_LARGE % (
                tokens, largest, planned.tokens_per_step, planned.micro_batch_tokens
            )  # fmt: skip
        saves = any(policy != RECOMPUTE for policy in self._policies())
        if unplanned and not self._warned and (saves or batch.has_media):
            self._warned = True
            _log.warning(
                "%s. Layers save nothing and are computed again in the backward", unplanned
            )
        return not unplanned

    def _can_save_memory(self, parts: TrainingParts, batch: Batch) -> bool:
        """True if a step that ran out of memory can be tried again with less (one rank only)."""
        can_repeat = not (self._saves_memory or parts.update.torn or self.ranks.size > 1)
        most_rows = max(len(micro.inputs["input_ids"]) for micro in batch.micro)
        has_graphs = any(policy != RECOMPUTE for policy in self._policies())
        return can_repeat and (most_rows > 1 or has_graphs)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, T, V]`, fp32 on the CPU, of one micro-batch without labels."""
        logits = self.run_forward([batch], NO_LABELS, Head.logits)
        return self._intake.share.joined(logits, [batch])[0]

    def label_losses(self, micro_batches: MicroBatches, loss: Loss) -> list[Tensor]:
        """Losses `[B, T]` on the CPU, at the position that predicts the label; 0 without one."""
        losses = self.run_forward(micro_batches, loss, Head.losses)
        return self._intake.share.joined(losses[: len(micro_batches)], micro_batches)

    def run_forward(self, micro_batches: MicroBatches, loss: Any, finish: Finish[Result]) -> Result:
        """Run the forward alone; return `finish(head, its weights, batch, last activations)`."""
        with self._exclusive():
            return self._forward_only(self._prepare(micro_batches, loss), finish)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let no other call run meanwhile; InputError if one is running, in any thread."""
        if self._running:
            raise InputError(
                "another call of this engine is running, in a thread or around this one; let it end"
            )
        try:
            with changed([self], _running=True):
                yield
        except KeyboardInterrupt as error:
            # If this came within a context's `__exit__`, the rest runs when the frame is freed.
            traceback.clear_frames(error.__traceback__)
            raise

    @contextmanager
    def whole_model(
        self, *, spare: int | None = None, apart: bool = False
    ) -> Iterator[PreTrainedModel]:
        """Yield the transformers model, for `generate` and the like, with streamed weights.

        The model is in evaluation mode, without gradients. No other method of the engine may be
        called meanwhile. Several ranks call the model with the same inputs and get the same logits.

        Args:
            spare: with one rank, keep all weights on the device if that leaves `spare` bytes free.
            apart: ranks call the model with different inputs, but of one shape and equally often.
        """
        with self._exclusive():
            check_call(self._opened, self._steps, NO_LABELS)
            if self._opened.sequence_ranks.size > 1:
                raise InputError(
                    "whole_model and generate are not for ranks that share rows yet; make an "
                    "engine without sequence_parallel"
                )
            self._require_texts()
            self.flush()
            self._program.train(False)
            context = whole_model(self._opened, self._parts, self._store, spare, apart=apart)
            with self._undisturbed(), context as model:
                yield model

    def require_held(self) -> None:
        """Raises InputError: parameters are trained that the adapter's folder does not hold."""
        if self.optimizer is not None:
            require_held(self._opened.source.model)

    def _require_texts(self) -> None:
        """Raises InputError: the model has no head of next tokens."""
        if self._spec.capture.task != "CAUSAL_LM":
            raise InputError(
                "the model gives scores of rows or classes, or embeddings, and no texts; use "
                "Engine.rewards, logits or embeddings"
            )

    @property
    def generation_config(self) -> GenerationConfig:
        """The source's generation config: the defaults for `generate`.

        Raises InputError: the model makes no texts.
        """
        self._require_texts()
        return self._opened.source.model.generation_config

    def _forward_only(self, batch: Batch, finish: Finish[Result]) -> Result:
        with self._undisturbed():
            return forward_only(self._parts.for_batch(batch), batch, finish)

    def _undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed(self.device, self._dtype, clips=self._opened.max_grad_norm is not None)

    def _prepare(self, micro_batches: MicroBatches, loss: Any, alike: Any = None) -> Batch:
        """Check micro-batches and move them to the device; set the model to train or evaluate.

        Args: `alike`: arguments that all ranks must pass alike; None: nothing is trained.
        """
        check_call(self._opened, self._steps, loss, alike)
        with plain_tensors():
            labelled = None if loss is NO_LABELS else loss
            batch = self._intake.batch(micro_batches, labelled, self._steps)
        self._program.train(alike is not None)
        return batch

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Time all work put on the device within the block; the list is filled at its end."""
        spans: list[Span] = []
        self.device.start()
        try:
            yield spans
        finally:
            spans.extend(self.device.stop())

    def flush(self) -> None:
        """Wait until all started updates are done."""
        for tile in self._store.tiles:
            self.device.synchronize(tile.updated, "version complete")
            self.device.synchronize(tile.written, "version complete on disk")

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and a CPU copy of its fp32 master; all ranks call this."""
        self.flush()
        for tile, entry in self._store.entries():
            yield entry.name, tile.whole_master(entry, self.ranks)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | str | None = None, merged: bool = False
    ) -> None:
        """Write a Hugging Face folder in `dtype` (None: that of the model's source).

        Frozen parameters without a given `dtype`, and all buffers, are written with the source's
        values. Files of the source folder that are still valid (generation settings, tokenizer,
        templates, code) are copied, unless `folder` has a file of that name.

        An adapter is written alone, as PEFT does, in float32 or `dtype`; `merged`: the whole model.

        Raises:
            InputError: the model cannot be built again (see `save`), `dtype` has more bits than an
                engine without an optimizer has kept, or `folder` is the base of the adapter.
            RunFailed: the folder cannot be written; nothing is left behind.
        """
        source = self._opened.source
        self._require_saveable()
        if self._torn:
            _log.warning("%s; the weights that are written are not all of one step", _TORN)
        dtype = source.untrained.export_dtype(dtype)
        if not merged:
            self.require_held()
        self.flush()

        def write(masters: Values) -> None:
            write_model(Path(folder), source, masters, dtype=dtype, merged=merged)

        entries = self._store.entries()
        masters = {e.name: partial(t.whole_master, e, self.ranks) for t, e in entries}
        self.ranks.serve(masters, write)

    def save(
        self,
        folder: str | Path,
        *,
        extra: dict[str, Any] | None = None,
        attach: Callable[[Path], None] | None = None,
        keep: bool = False,
        wait: bool = True,
    ) -> Saving:
        """Save the exact state after the last step, so that `load` goes on bit for bit.

        The folder appears, or is replaced, when all of it is on the disk. A save first waits for
        the save before it; to skip a save instead, look at `saving` first.

        Args:
            extra: JSON values of the caller, which `open_checkpoint(folder).extra` gives back.
            attach: called on another thread with the checkpoint's folder `model`, into which it
                writes more files (a tokenizer).
            keep: mark the checkpoint, so that `checkpoint.rotate` never removes it.
            wait: return when all is on the disk; else at once, and steps may be taken meanwhile.

        Raises:
            InputError: `extra` is not JSON, `folder` is a file or holds more than a checkpoint, or
                the model cannot be built again (an engine with an optimizer refuses such a model
                when it is made, unless `saveable=False`).
            RunFailed: the folder could not be written (with `wait`; else the Saving says so), or a
                step was broken off when updates had begun. Older checkpoints stay as they are.
        """
        self._require_saveable()
        folder = Path(os.path.abspath(folder))
        require_replaceable(folder)
        if self._torn:
            raise RunFailed(
                f"{_TORN}, so there is no step's state to save; go back to the last checkpoint"
            )
        with self._exclusive():
            source = self._opened.source
            untrained = replace(source.untrained, buffers={**source.untrained.buffers})
            source = replace(source, untrained=untrained)  # a copy: steps change routers' biases
            entries = [entry for _, entry in self._store.entries()]
            settings = settings_of(self._opened, self._steps, self.placement, entries, folder)
            documents = partial(write_documents, source=source, carries=settings.left_out is None)
            contents = Contents(settings, as_json(extra or {}), documents, attach, keep)
            background = self.optimizer is not None and not wait
            self.ranks.agree(lambda: self._checks.compare_all(wait=False))
            saving = self._saver.begin(folder, contents, background=background)
        if wait:
            saving.wait()
        return saving

    def _require_saveable(self) -> None:
        """Raises InputError if a save could not be loaded as this model, or a call is running."""
        with self._exclusive():
            reason = self._opened.source.lost
        if reason is not None:
            raise InputError(reason)

    @property
    def _torn(self) -> bool:
        return isinstance(self._parts, TrainingParts) and self._parts.update.torn

    @property
    def saving(self) -> Saving | None:
        """The save that is running; None if no save is."""
        last = self._saver.last
        return None if last is None or last.done else last

    @property
    def steps(self) -> int:
        """Optimizer steps done, the steps before a `load` included."""
        return self._steps

    def memory(self) -> dict[str, int]:
        """Bytes in use: of host memory by purpose, of the disk, of the device and its peak."""
        sizes = host_bytes(self._store, self._parts)
        sizes["host_checkpoint_bytes"] = self._saver.staging.num_bytes
        totals = {"host_bytes": sum(sizes.values()), "disk_bytes": self._store.disk.num_bytes}
        return {**sizes, **totals, **self.device.memory()}

    def close(self) -> None:
        """Wait for running work, a save included, and free all memory; the engine is unusable."""
        if "_parts" not in vars(self):
            return
        for part in (self._saver, self.device, self._store):
            part.close()
        for name in _BUILT:
            delattr(self, name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _BUILT:
                raise RunFailed("the engine is closed; make a new one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
