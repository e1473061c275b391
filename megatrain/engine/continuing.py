"""The part of an engine that saves it, and goes on from what was saved."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch

from megatrain.checkpoint import (
    Contents,
    Saver,
    Saving,
    Settings,
    as_json,
    open_checkpoint,
    require_replaceable,
)
from megatrain.device import Device, Recording, open_device
from megatrain.engine.kept_graphs import KeptGraphs
from megatrain.engine.resume import (
    check_precision,
    describe_optimizer,
    documents,
    resumed_placement,
    saved_optimizer,
    settings_of,
)
from megatrain.engine.step import Parts, TrainingParts
from megatrain.engine.untrained import Untrained
from megatrain.errors import RunFailed
from megatrain.model.companions import Companions
from megatrain.model.export import write_weights
from megatrain.model.outline import Outline
from megatrain.optim import AdamW, StreamedOptimizer
from megatrain.placement import Placement
from megatrain.store import Store


class Continuing:
    """`save`, `load` and `save_pretrained`; the engine sets the attributes."""

    device: Recording
    optimizer: StreamedOptimizer | None
    placement: Placement
    _outline: Outline
    _parts: Parts
    _store: Store
    _saver: Saver
    _kept: KeptGraphs | None
    _given: AdamW | None
    _precision: str
    _max_grad_norm: float | None
    _seed: int
    _steps: int
    _source_dtype: torch.dtype
    _untrained: Untrained
    _companions: Companions

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

        The folder appears, or is replaced, when all of it is on the disk. A save waits for the one
        before it: whoever would rather skip one looks at `saving` first.

        Args:
            extra: JSON values of the caller, which `open_checkpoint(folder).extra` gives back.
            attach: writes more files (a tokenizer) into the folder given, the checkpoint's
                `model`; runs on another thread.
            keep: mark it, so that `checkpoint.rotate` never removes it.
            wait: return when it is on the disk; else at once, and steps may be taken meanwhile.

        Raises:
            InputError: `extra` is not JSON, or `folder` is a file or holds more than a checkpoint.
            RunFailed: it could not be written (with `wait`; else the Saving says so), or a step
                was broken off when updates had begun. Older checkpoints stay as they are.
        """
        folder = Path(os.path.abspath(folder))
        require_replaceable(folder)
        if isinstance(self._parts, TrainingParts) and self._parts.update.torn:
            raise RunFailed(
                "a step was broken off when updates had begun, so there is no step's state to "
                "save; go back to the last checkpoint"
            )
        model = self._outline.skeleton.model
        buffers, beside = self._untrained.buffers, self._companions
        written = documents(model, self._source_dtype, buffers, beside)
        contents = Contents(self._described(), as_json(extra or {}), written, attach, keep)
        background = self.optimizer is not None and not wait
        saving = self._saver.begin(folder, contents, background=background)
        if wait:
            saving.wait()
        return saving

    def _described(self) -> Settings:
        optimizer = self.optimizer
        return settings_of(
            self._outline.skeleton.model,
            self._source_dtype,
            self._untrained,
            steps=self._steps,
            seed=self._seed,
            precision=self._precision,
            max_grad_norm=self._max_grad_norm,
            device=self.device.kind,
            placement=self.placement.as_dict(),
            kept_graphs=None if self._kept is None else self._kept.as_dict(),
            optimizer=describe_optimizer(self._given),
            groups=() if optimizer is None else tuple(optimizer.saved_groups()),
            num_steps=0 if optimizer is None else optimizer.num_steps,
        )

    def flush(self) -> None:
        """Wait until every update that has been started is done."""
        for tile in self._store.tiles:
            self.device.synchronize(tile.updated, "version complete")

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face folder in `dtype` (None: that of the model's source).

        What is not trained is written as it came, buffers in any case; parameters in `dtype` where
        one is given. Files of the source folder that still hold go along (generation settings,
        tokenizer, templates, code), where `folder` has none of that name.

        Raises:
            InputError: more bits are wanted than an engine without an optimizer has kept.
            RunFailed: it cannot be written; nothing is left behind.
        """
        self._untrained.check_export(dtype)
        self.flush()
        model = self._outline.skeleton.model
        masters = {
            entry.name: (lambda tile=tile, entry=entry: tile.read_master(entry))
            for tile, entry in self._store.entries()
        }
        values, as_came = masters | self._untrained.values, self._untrained.as_came(dtype)
        chosen = dtype or self._source_dtype
        beside = self._companions
        write_weights(Path(folder), model, values, dtype=chosen, as_came=as_came, beside=beside)

    @property
    def saving(self) -> Saving | None:
        """The save that is going on; None if there is none."""
        last = self._saver.last
        return None if last is None or last.done else last

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a `load` included."""
        return self._steps

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        placement: Placement | Literal["auto"] | None = None,
        device: str | Device | None = None,
        precision: Literal["bf16", "fp32"] | None = None,
        max_grad_norm: float | Literal["saved"] | None = "saved",
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
    ) -> Self:
        """An engine that goes on where `save` was called.

        Args:
            folder: a checkpoint; every byte of it is checked.
            placement: None takes the saved one, if the kind of device is the same; else `auto`.
            precision: as a check: it cannot change.
            max_grad_norm: another one, or None, from now on.
            attn_implementation: None takes the saved one.
            device_memory, host_memory: as `Engine` takes them.

        Raises:
            InputError: the checkpoint is damaged or cannot be used as wanted; the message names
                the file, and another checkpoint beside it that is whole.
            DoesNotFit: not enough host or device memory.
        """
        checkpoint = open_checkpoint(folder)
        settings = checkpoint.settings
        opened = device if isinstance(device, Device) else open_device(device)
        make: Any = cls
        engine = make(
            checkpoint,
            optimizer=saved_optimizer(checkpoint),
            max_grad_norm=settings.max_grad_norm if max_grad_norm == "saved" else max_grad_norm,
            precision=check_precision(checkpoint, precision),
            placement=resumed_placement(checkpoint, placement, opened.kind),
            device=opened,
            seed=settings.seed,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            device_memory=device_memory,
            host_memory=host_memory,
        )
        engine._resume(settings, chosen=placement is not None)
        return engine

    def _resume(self, settings: Settings, *, chosen: bool) -> None:
        self._steps = settings.steps
        if self.optimizer is not None:
            self.optimizer.restore(settings.groups, settings.num_steps)
        if settings.kept_graphs is not None and not chosen and self.device.kind == settings.device:
            self._kept = KeptGraphs(len(self._outline.layers), 0)
            self._kept.restore(settings.kept_graphs)
