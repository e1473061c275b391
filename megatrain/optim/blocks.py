"""Updates in plain torch, for rules that have no kernel of their own: block by block."""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatrain.optim.rule import master_of

# Elements updated at a time. On the host what torch makes meanwhile stays in a core's cache,
# five times as fast as with 1 << 21; on a device it is small.
_HOST_BLOCK, _DEVICE_BLOCK = 1 << 15, 1 << 21


def update_blocks(
    weights: Tensor,
    remainder: Tensor | None,
    states: Sequence[Tensor],
    grad: Tensor,
    grad_scale: float,
    move: Callable[..., None],
) -> None:
    """`move(master, gradient, *states)` for each block of a range, all in fp32.

    `move` changes masters and states in place, and may write the gradient. Each of its operations
    has to round once, so that no bit depends on how torch groups elements.
    """
    block = _HOST_BLOCK if weights.device.type == "cpu" else _DEVICE_BLOCK
    for start in range(0, weights.numel(), block):
        part = slice(start, start + block)
        rest = None if remainder is None else remainder[part]
        with master_of(weights[part], rest) as master:
            move(master, grad[part].float() * grad_scale, *(state[part] for state in states))
