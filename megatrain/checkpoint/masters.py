"""A checkpoint's weights without its engine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.checkpoint.folders import offering_another
from megatrain.checkpoint.manifest import Checkpoint, Parameter
from megatrain.checkpoint.read import tile_planes
from megatrain.model.safetensors_io import Stored

READERS = 4


def masters(checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """For each parameter, by name, a function that reads its exact fp32 master, on the CPU.

    The bytes of all of them are checked here; the optimizer's state is not looked at.

    Raises:
        InputError: a file is damaged.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    with (
        offering_another(checkpoint.folder),
        ThreadPoolExecutor(READERS, thread_name_prefix="check-checkpoint") as pool,
    ):
        checks = []
        for tile in checkpoint.manifest.tiles:
            planes = tile_planes(checkpoint, tile)
            for name in ("weights", "remainder"):
                if name in planes:
                    start, stop = planes[name].start, planes[name].start + planes[name].num_bytes
                    checks.append(pool.submit(checkpoint.check_file, tile.file, start, stop))
            for parameter in tile.parameters:
                found[parameter.name] = partial(_master, planes, parameter)
        for each in checks:
            each.result()
    return found


def _master(planes: dict[str, Stored], parameter: Parameter) -> Tensor:
    weights, packed = _values(planes["weights"], parameter), parameter.entry.packed
    if packed is not None:
        return packed.unpacked(weights, parameter.shape)
    rest = planes.get("remainder")
    if rest is None or parameter.offset >= rest.shape[0]:  # it came in bf16, and is frozen
        return weights.float().view(parameter.shape)
    master = torch.empty(weights.numel(), dtype=torch.float32)
    kernels.join(weights, _values(rest, parameter), master, threads=1)
    return master.view(parameter.shape)


def _values(plane: Stored, parameter: Parameter) -> Tensor:
    size = plane.dtype.itemsize
    data = plane.read_bytes(parameter.offset * size, parameter.entry.stored * size)
    return data.view(plane.dtype)
