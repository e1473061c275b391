"""The engine as its users see it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.autoplace.budget import check_fits, limits
from megatrain.autoplace.fit import (
    available_bytes,
    foreseen_placement,
    foretold_on_cpu,
    initial_placement,
)
from megatrain.checkpoint import Checkpoint, Saver
from megatrain.device import Buffer, Device, Recording, open_device
from megatrain.engine.assemble import Assembly, Source, fill, host_bytes, open_source, tile_layouts
from megatrain.engine.batch import Batch, prepare
from megatrain.engine.continuing import Continuing
from megatrain.engine.hostroom import HostRoom
from megatrain.engine.kept_graphs import KeptGraphs
from megatrain.engine.masks import check_masks
from megatrain.engine.packing import Packing
from megatrain.engine.step import Parts, TrainingParts, forward_only, train_step
from megatrain.engine.units import Head, State
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.forecast import Forecast
from megatrain.forecast.needs import Question
from megatrain.model.probe import outline
from megatrain.model.program import Program
from megatrain.optim import AdamW, StreamedOptimizer, is_number
from megatrain.placement import Placement
from megatrain.seeds import derived_seed
from megatrain.store import Store
from megatrain.telemetry.timeline import Span
from megatrain.tile import TileLayout

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MicroBatches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: mean cross entropy over all labelled tokens of the step, before the update.
        grad_norm: global 2-norm of the gradient, before clipping.
        tokens: positions computed, padding included.
        seconds: from the call to the end of the backward (the update may still be running).
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float


class Engine(Continuing):
    """Trains a causal language model whose state rests in host memory.

    Attributes:
        config: the model's transformers configuration.
        optimizer: a `torch.optim.Optimizer` whose groups can be scheduled; None for inference.
        num_parameters: distinct parameters, frozen ones included.
        label_shift: how many tokens after its logits a label is; 1, unless the model's own is 0.
        micro_batch: rows that micro-batches should have; None where nothing was foreseen.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig | Checkpoint | str | Path,
        *,
        optimizer: AdamW | None = None,
        max_grad_norm: float | None = 1.0,
        precision: Literal["bf16", "fp32"] = "bf16",
        placement: Placement | Literal["auto"] = "auto",
        device: str | Device | None = None,
        seed: int = 0,
        tokens_per_step: int | None = None,
        sequence_length: int | None = None,
        micro_batch: int | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
    ) -> None:
        """Open a model and bring its weights to host memory.

        Args:
            model: a transformers model (its weights are copied; on the meta device: drawn), a
                configuration (weights drawn), a folder, a hub id, or a checkpoint (see `load`).
            optimizer: None leaves out all that only training needs (2 bytes per parameter).
            max_grad_norm: exact clipping of the global norm; None for none.
            precision: what layers are computed in; masters and moments are fp32.
            device: `cpu`, `cuda`, `cuda:N`, or a device; None takes the GPU if there is one.
            seed: of weights drawn and of dropout.
            tokens_per_step: how many a step will have at most, for `placement="auto"`.
            sequence_length: of rows; with both known the placement is the fastest by forecast.
            micro_batch: rows of the micro-batches to come; None: chosen, see `micro_batch`.
            attn_implementation: any that transformers knows; None leaves it the choice.
            device_memory: that this process may take on the GPU in all, the driver's context and
                all other work in torch included (`"10GiB"`, or bytes); None: what there is.
            host_memory: resident memory that the process may have; None: what the machine allows.

        Raises:
            InputError: a model or argument that cannot be used; the message says why.
            DoesNotFit: not enough host or device memory.
        """
        _check_arguments(optimizer, max_grad_norm, precision, placement, seed)
        source = open_source(
            model, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
        self._outline = outline(source.model)
        self.config: PreTrainedConfig = source.model.config
        self._source_dtype, self._precision = source.dtype, precision
        self.optimizer = None if optimizer is None else StreamedOptimizer(optimizer, source.model)
        groups = self.optimizer.group_of() if self.optimizer else {}
        self.device = Recording(device if isinstance(device, Device) else open_device(device))
        device_limit, self._host_limit = limits(device_memory, host_memory)
        self.device.limit(device_limit, self._host_limit)
        layouts = tile_layouts(self._outline, groups)
        self._seed, self._steps, self.label_shift = seed, 0, self._outline.label_shift
        self._given, self._max_grad_norm = optimizer, max_grad_norm
        sizes = tokens_per_step, sequence_length, micro_batch
        self._place(placement, layouts, precision, sizes)
        self._packing = Packing(self.config, DTYPES[precision], self._trial_losses)
        self._assemble(source, layouts, DTYPES[precision], max_grad_norm)

    def _assemble(
        self,
        source: Source,
        layouts: list[TileLayout],
        dtype: torch.dtype,
        max_grad_norm: float | None,
    ) -> None:
        """Make the planes, fill them, and build the parts of a step on them."""
        train, resident, plan = self.optimizer is not None, self.placement.resident, self._plan
        self._store = Store(self.device, layouts, dtype, train=train, resident=resident)
        self.num_parameters = sum(t.layout.num_parameters for t in self._store.tiles)
        # Without clipping, updates follow the backward: the last tile is the first.
        spare, backward = self.placement.save_bytes, max_grad_norm is None
        tiles, limit = self._store.tiles, self._host_limit
        self._saver = Saver(self.device, tiles, spare, limit, reverse=backward)
        with self._undisturbed():
            fill(source, self._outline, self._store, self._seed)
        self._untrained, self._companions = source.untrained, source.companions
        self._program = Program(self._outline, self.device.torch_device, dtype)
        self._program.tile_epilogue(self.placement.head_tokens)
        assembly = Assembly(self.device, self._program, self._store, dtype, self.placement)
        self._parts: Parts = (
            assembly.inference()
            if self.optimizer is None
            else assembly.training(self.optimizer, max_grad_norm)
        )
        planned = None if plan is None else (plan.host_bytes, plan.tokens_per_step)
        self._host = HostRoom(self._store, self._parts, self._host_limit, planned)

    def _place(
        self,
        placement: Placement | Literal["auto"],
        layouts: list[TileLayout],
        precision: Literal["bf16", "fp32"],
        sizes: tuple[int | None, int | None, int | None],
    ) -> None:
        """Take or choose the placement, and check that it fits."""
        self._kept: KeptGraphs | None = None
        self.micro_batch = sizes[2]
        self._plan: Forecast | None = None
        if isinstance(placement, Placement):
            self.placement = placement
        else:
            self._choose(layouts, precision, sizes)
        dtype, norm = DTYPES[precision], self._max_grad_norm
        asked = Question(self._outline, layouts, dtype, self.optimizer, norm, sizes[0])
        foretold = foretold_on_cpu(self.device, asked, self.placement, *sizes[1:])
        check_fits(self.device, asked, self.placement, self._host_limit, foretold)

    def _choose(
        self,
        layouts: list[TileLayout],
        precision: Literal["bf16", "fp32"],
        sizes: tuple[int | None, int | None, int | None],
    ) -> None:
        """Choose the placement: by forecast, or by the device's memory."""
        tokens, length, rows = sizes
        train, on_gpu = self.optimizer is not None, self.device.kind == "cuda"
        if train and on_gpu and tokens is not None and length is not None:
            found = foreseen_placement(
                self._outline,
                self.device,
                tokens_per_step=tokens,
                sequence_length=length,
                micro_batch=rows,
                clip=self._max_grad_norm is not None,
                precision=precision,
                host_limit=self._host_limit,
            )
            if found is not None:
                self.placement, self.micro_batch = found.placement, found.micro_batch
                self._plan = found
                return
        self.placement = initial_placement(
            self.device, layouts, train=train, bf16=precision == "bf16", tokens_per_step=tokens
        )
        if train and on_gpu:
            self._kept = KeptGraphs(len(self._outline.layers), available_bytes(self.device))

    @property
    def vocab_size(self) -> int:
        """Token ids must be below this."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def _max_tokens(self) -> int | None:
        """Tokens of the longest row that the model is made for; None: any number."""
        text = self.config.get_text_config(decoder=True)
        given = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
        return next((n for n in given if isinstance(n, int) and n > 0), None)

    def step(self, micro_batches: MicroBatches, *, norm_limit: float = math.inf) -> StepResult:
        """One optimizer step over all of `micro_batches`.

        Args:
            micro_batches: dictionaries of CPU int64 tensors `[B, T]`: `input_ids`, `labels` (-100:
                none; shifted by `label_shift`), `attention_mask` (0: padding), `position_ids`.
            norm_limit: refuse the step if its gradient norm is above this; needs `max_grad_norm`.

        Raises:
            InputError: bad micro-batches or settings of the optimizer, or an engine without one.
            StepRefused: loss or gradient norm is not finite, or the norm above the limit; says
                whether a weight has been changed (never, with `max_grad_norm`).
            RunFailed: a host thread failed.
        """
        if not isinstance(self._parts, TrainingParts) or self.optimizer is None:
            raise InputError("this engine has no optimizer; make it with optimizer=AdamW(...)")
        self.optimizer.check()
        start = time.perf_counter()
        batch = self._prepare(micro_batches, labelled=True, train=True)
        self._parts.update.norm_limit = norm_limit
        self._parts.keep_graphs(self._graphs_to_keep(batch))
        with self._undisturbed(), self._host.of(batch.num_tokens):
            report = train_step(self._parts, batch)
        if self._kept is not None:
            self._kept.note(batch.num_tokens, self.device.memory()["device_used_peak_bytes"])
        self._steps += 1
        self.optimizer.took_step()
        seconds = time.perf_counter() - start
        return StepResult(report.loss, report.grad_norm, batch.num_tokens, seconds)

    def _graphs_to_keep(self, batch: Batch) -> int:
        if self._kept is not None:
            keep = self._kept.choose(batch.num_tokens)
            self.placement = replace(self.placement, keep_layers=keep)
            return keep
        if (plan := self._plan) is not None:
            largest = max(micro.inputs["input_ids"].numel() for micro in batch.micro)
            planned = plan.micro_batch * plan.sequence_length
            if batch.num_tokens > plan.tokens_per_step or largest > planned:
                return 0  # the placement was chosen for less
        return self.placement.keep_layers

    def evaluate(self, micro_batches: MicroBatches) -> float:
        """Mean cross entropy over all labelled tokens; changes no state, dropout is off."""
        batch = self._prepare(micro_batches, labelled=True)
        losses = self._forward_only(batch, lambda head, slot, h: head.loss(slot, batch, h))
        return float(torch.stack(losses).sum())

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, T, V]`, fp32 on the CPU, of one micro-batch without labels."""
        prepared = self._prepare([batch], labelled=False)
        made = self._forward_only(prepared, lambda head, slot, h: head.logits(slot, prepared, h))
        return made[0]

    def _forward_only(self, batch: Batch, finish: Callable[[Head, Buffer, State], Any]) -> Any:
        with self._undisturbed():
            return forward_only(self._parts, batch, finish)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The caller's random numbers and autograd modes neither disturb nor are disturbed."""
        gpus = [self.device.torch_device] if self.device.kind == "cuda" else []
        try:
            with torch.random.fork_rng(devices=gpus), torch.inference_mode(False):
                yield
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
            raise DoesNotFit(
                f"the device has no memory left ({reason}); use smaller micro-batches, "
                "placement.boundaries: host, fewer resident tiles or slots, less other torch work"
                + (" (no weight has been changed)" if self._max_grad_norm is not None else "")
            ) from error

    def _prepare(
        self, micro_batches: MicroBatches, *, labelled: bool, train: bool = False
    ) -> Batch:
        with torch.inference_mode(False):
            batch = self._checked(micro_batches, labelled=labelled)
            if self.device.kind == "cuda":
                text, dtype = self.config.get_text_config(decoder=True), DTYPES[self._precision]
                check_masks(micro_batches, text, dtype.itemsize, available_bytes(self.device))
            self._packing.check(micro_batches)
        self._program.train(train)
        return batch

    def _trial_losses(self, micro_batches: MicroBatches) -> list[Tensor]:
        self._program.train(False)
        batch = self._checked(micro_batches, labelled=True)
        with self._program.eager():
            return self._forward_only(batch, lambda head, slot, h: head.losses(slot, batch, h))

    def _checked(self, micro_batches: MicroBatches, *, labelled: bool) -> Batch:
        return prepare(
            micro_batches,
            self.device.torch_device,
            self.vocab_size,
            labelled=labelled,
            label_shift=self.label_shift,
            seed=derived_seed(self._seed, self._steps),
            constants=self._outline.constants,
            max_tokens=self._max_tokens,
        )

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Take times of all work put on the device within the block; the list is filled after."""
        spans: list[Span] = []
        self.device.start()
        try:
            yield spans
        finally:
            spans.extend(self.device.stop())

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every distinct parameter: Hugging Face name and a copy of its fp32 master, on the CPU."""
        self.flush()
        for tile, entry in self._store.entries():
            yield entry.name, tile.read_master(entry)

    def memory(self) -> dict[str, int]:
        """Bytes by place: host planes, rows, gradients, boundaries; device memory and its peak."""
        sizes = host_bytes(self._store, self._parts)
        sizes["host_checkpoint_bytes"] = self._saver.host_bytes
        return {**sizes, "host_bytes": sum(sizes.values()), **self.device.memory()}

    def close(self) -> None:
        """Finish what runs, a save included, and give back pinned memory; the engine is done."""
        self._saver.close()
        self.device.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _check_arguments(
    optimizer: Any, max_grad_norm: Any, precision: Any, placement: Any, seed: Any
) -> None:
    if optimizer is not None and not isinstance(optimizer, AdamW):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}; it must be megatrain.AdamW(...), or None"
        )
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise InputError(f"max_grad_norm is {max_grad_norm!r}; it must be positive, or None")
    if precision not in DTYPES:
        raise InputError(f"precision is {precision!r}; it must be bf16 or fp32")
    if placement != "auto" and not isinstance(placement, Placement):
        raise InputError(f"placement is {placement!r}; it must be 'auto' or a Placement(...)")
    if type(seed) is not int:
        raise InputError(f"seed is {seed!r}; it must be an integer")
