"""Checks of the device and the disk, before data is read: else a run would fail after hours."""

import logging
import shutil
from pathlib import Path

from megatrain.base.units import gib
from megatrain.config import Config
from megatrain.device import find_device
from megatrain.errors import DoesNotFit, InputError
from megatrain.model.adapters import adapted
from megatrain.model.float8 import require_float8
from megatrain.optim import gradient_plane, parameter_bytes
from megatrain.parallel.distributed import Ranks, local_rank
from megatrain.source.engine_setup import DTYPES
from megatrain.source.source import Source
from megatrain.train.resume import Start

log = logging.getLogger(__name__)


def check_device(config: Config, ranks: Ranks) -> None:
    """Look for the device of this rank, and say where a run that may choose takes the CPU.

    Raises InputError: there is no such device, or it cannot do what the run asks of it.
    """
    name, shared = config.engine.device, config.engine.sequence_parallel
    device = find_device(name, local_rank(ranks.host))
    if config.engine.precision == "fp8":
        require_float8(device)
    if config.engine.device_memory is not None and device.type == "cpu":
        raise InputError("device_memory limits a GPU, but the device is cpu; set host_memory")
    if shared not in (1, ranks.size):
        raise InputError(
            f"engine.sequence_parallel is {shared}, and the run has {ranks.size} "
            f"process{'es' * (ranks.size > 1)}: set engine.devices to {shared}, or it to 1"
        )
    if name == "auto" and device.type == "cpu":
        log.warning(
            "torch sees no GPU here: the run computes on the CPU, many times slower; check "
            "nvidia-smi and that torch is a CUDA build, or set engine.device: cpu if this is meant"
        )


def check_disk(config: Config, model: Source | Start | None, total_steps: int | None) -> None:
    """See whether the disk has room for the checkpoints that there will be at once, and the model.

    Args:
        model: without weights; what requires gradients is trained. Of a run that goes on its
            start: there must be room for one more checkpoint.
        total_steps: None: not known yet, so that only one checkpoint is counted.

    Raises DoesNotFit: it has not.
    """
    if isinstance(model, Start):
        folder, remedies = model.checkpoint.parent, []
        if not config.checkpoint.at_end and config.checkpoint.every is None:
            return
        files = (path for path in model.checkpoint.rglob("*") if path.is_file())
        needed, takes = sum(path.stat().st_size for path in files), "the next checkpoint takes"
    else:
        assert model is not None
        folder = Path(config.output.folder or "runs").expanduser().absolute()
        number = _checkpoints_at_once(config, total_steps)
        checkpoint, exported = _bytes_of(config, model)
        needed, takes = number * checkpoint + exported, "the model takes"
        remedies = ["set output.folder to a folder on another disk"]
        if number:
            of_each = f"{number} checkpoint{'s' * (number > 1)} of {gib(checkpoint)}"
            takes = f"{of_each} and the model take"
        if number > 2:
            remedies.append("lower checkpoint.keep (or raise keep_every)")
        elif number:
            remedies.append("save less often (checkpoint.every: null, checkpoint.at_end: false)")
    room = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    if needed > room.free and room.total > 0:  # /proc and its like say nothing
        remedies = [f"free {gib(needed - room.free)}", *remedies]
        raise DoesNotFit(
            f"{folder}: the disk has {gib(room.free)} left, and {takes} {gib(needed)}; "
            + ", or ".join(remedies)
        )


def _checkpoints_at_once(config: Config, total_steps: int | None) -> int:
    """While the newest is written, those that stay are there, too."""
    settings = config.checkpoint
    if total_steps is None:
        return int(settings.at_end)
    saves = 0 if settings.every is None else total_steps // settings.every
    saves += settings.at_end and (settings.every is None or total_steps % settings.every > 0)
    marked = 0 if settings.keep_every is None else total_steps // settings.keep_every
    return min(saves, max(settings.keep, marked) + 1)


def _bytes_of(config: Config, source: Source) -> tuple[int, int]:
    """The least that a checkpoint takes, and the model at the run's end."""
    parameters = list(source.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    rule, dtype = config.optimizer.rule(), DTYPES[config.engine.precision]
    per_trained = parameter_bytes(rule, dtype) - gradient_plane(dtype).bytes_per_parameter
    if adapted(source.model) is not None:  # the base is neither in checkpoints nor in the model
        return int(trained * per_trained), 4 * trained
    packed = source.base != "bf16"
    saved = trained * per_trained + (0 if packed else 2 * frozen)
    return int(saved), (trained + frozen) * source.dtype.itemsize
