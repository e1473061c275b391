"""What a run would only end with after hours, if it were not looked at before data is read."""

import logging
import shutil
from pathlib import Path

from torch import device as TorchDevice

from megatrain.config import Config
from megatrain.device import find_device
from megatrain.distributed import Ranks, local_rank
from megatrain.errors import DoesNotFit
from megatrain.model.adapters import adapted
from megatrain.optim import gradient_plane, parameter_bytes
from megatrain.source.opened import DTYPES
from megatrain.source.source import Source
from megatrain.units import gib

log = logging.getLogger(__name__)


def check_device(config: Config, ranks: Ranks) -> TorchDevice:
    """The device of this rank; says where a run that may choose takes the CPU.

    Raises:
        InputError: there is no such device.
    """
    name = config.engine.device
    device = find_device(name, local_rank(ranks.host))
    if name == "auto" and device.type == "cpu":
        log.warning(
            "torch sees no GPU here: the run computes on the CPU, many times slower; check "
            "nvidia-smi and that torch is a CUDA build, or set engine.device: cpu if this is meant"
        )
    return device


def check_disk(config: Config, source: Source, total_steps: int | None) -> None:
    """See whether the disk has room for the checkpoints that there will be at once, and the model.

    Args:
        source: the model, without weights; what requires gradients is trained.
        total_steps: None: not known yet, so that only one checkpoint is counted.

    Raises:
        DoesNotFit: it has not.
    """
    number = _checkpoints_at_once(config, total_steps)
    checkpoint, model = _bytes_of(config, source)
    needed = number * checkpoint + model
    path = Path(config.output.folder or "runs").expanduser().absolute()
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    room = shutil.disk_usage(place)
    if needed <= (free := room.free) or room.total == 0:  # /proc and its like say nothing
        return
    several = f"{number} checkpoint{'s' * (number > 1)} of {gib(checkpoint)} and the model take"
    takes = several if number else "the model takes"
    remedies = [f"free {gib(needed - free)}", "set output.folder to a folder on another disk"]
    if number > 2:
        remedies.append("lower checkpoint.keep (or raise keep_every)")
    elif number:
        remedies.append("save less often (checkpoint.every: null, checkpoint.at_end: false)")
    raise DoesNotFit(
        f"{path}: the disk has {gib(free)} left, and {takes} "
        f"{gib(needed)}; {', or '.join(remedies)}"
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
    each = parameter_bytes(rule, dtype) - gradient_plane(dtype).bytes_per_parameter
    if adapted(source.model) is not None:  # the base is neither in checkpoints nor in the model
        return int(trained * each), 4 * trained
    packed = source.base != "bf16"
    saved = trained * each + (0 if packed else 2 * frozen)
    return int(saved), (trained + frozen) * source.dtype.itemsize
