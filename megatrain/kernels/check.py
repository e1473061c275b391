"""Argument checks shared by the reference and the native kernels: programming errors, by name.

All raise ValueError, whose message names the argument.
"""

import torch
from torch import Tensor

from megatrain.kernels.states import GROUP, TileRange, UpdateOptions

GRADIENTS = MOMENTS = (torch.bfloat16, torch.float32)
REMAINDERS = (torch.int16, torch.int8)


def tensor(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...] | None, size: int | None = None
) -> None:
    """Require a contiguous CPU tensor, of one of `dtypes`, of `size` elements."""
    if dtypes is not None and value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {value.dtype}, expected {expected}")
    if value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, expected the CPU")
    if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    if size is not None and value.numel() != size:
        raise ValueError(f"{name} has {value.numel()} elements, expected {size}")


def copy(to: Tensor, source: Tensor) -> None:
    """Require two ranges of equally many bytes."""
    tensor("from", source, (torch.uint8,))
    tensor("to", to, (torch.uint8,), source.numel())


def planes(*, master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Require the three planes of a split master to agree."""
    tensor("master", master, (torch.float32,))
    tensor("weights", weights, (torch.bfloat16,), master.numel())
    tensor("remainder", remainder, REMAINDERS, master.numel())


def update_arguments(rule: str, tile: TileRange, options: UpdateOptions) -> None:
    """Require the planes of an update to agree in length; AdamW's `at` must begin a group."""
    size = tile.weights.numel()
    if tile.remainder is None:
        tensor("weights (without a remainder)", tile.weights, (torch.float32,))
    else:
        tensor("weights (with a remainder)", tile.weights, (torch.bfloat16,))
        tensor("remainder", tile.remainder, REMAINDERS, size)
    tensor("grad", tile.grad, GRADIENTS, size)
    if rule != "adamw":
        for state in tile.states:
            tensor("a state", state, (torch.float32,), size)
        return
    exp_avg, exp_avg_sq, *scales = tile.states
    if not scales:
        tensor("exp_avg", exp_avg, MOMENTS, size)
        tensor("exp_avg_sq", exp_avg_sq, (exp_avg.dtype,), size)
    else:
        tensor("exp_avg (with scales)", exp_avg, (torch.int8,), size)
        tensor("exp_avg_sq (with scales)", exp_avg_sq, (torch.uint8,), size)
        for name, scale in zip(("exp_avg", "exp_avg_sq"), scales, strict=True):
            tensor(f"the scale of {name}", scale, (torch.float32,), -(-size // GROUP))
    if options.at % GROUP:
        raise ValueError(f"at is {options.at}, no multiple of {GROUP}")


def rows(table: Tensor, row_ids: Tensor, rows_2d: Tensor) -> None:
    """Require a [R, W] table, [N] ids and [N, W] rows of one 2- or 4-byte dtype."""
    tensor("table", table, None)
    tensor("row_ids", row_ids, (torch.int64,))
    tensor("rows", rows_2d, (table.dtype,))
    if table.element_size() not in (2, 4):
        raise ValueError(f"table is {table.dtype}, expected a dtype of 2 or 4 bytes")
    if table.dim() != 2 or rows_2d.shape != (row_ids.numel(), table.shape[-1]):
        raise ValueError(
            f"table {tuple(table.shape)}, row_ids {tuple(row_ids.shape)} and rows "
            f"{tuple(rows_2d.shape)} do not fit: expected [R, W], [N] and [N, W]"
        )
