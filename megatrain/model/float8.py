"""Products of layers in float8: torchao's training recipe with one scale for a whole tensor.

Weights, inputs and gradients of `nn.Linear` are cast for each product (e4m3, gradients e5m2), with
scales from their largest value at that moment; results, weights and their gradients stay bf16
(torchao.float8, https://github.com/pytorch/ao/tree/main/torchao/float8). Heads, embeddings, routers
and experts that are no `nn.Linear` are computed in bf16.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatrain.errors import InputError

_MULTIPLE = 16  # of both sizes of a weight, for the GPU's float8 products
_CAPABILITY = (8, 9)  # Ada and Hopper: the first GPUs that have them
ROUTERS = frozenset(("gate", "router"))  # a small error of theirs would choose other experts


def convert(module: nn.Module, device: torch.device, wide: Collection[str] = ()) -> list[nn.Module]:
    """Let the linear modules of a layer's template compute in float8; returns them.

    Without a GPU the casts are real and products are computed in the type of the inputs.

    Args: `wide`: names of parameters that stay in fp32.

    Raises InputError: as `require_float8`.
    """
    require_float8(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def takes(child: nn.Module, name: str) -> bool:
        return f"{name}.weight" not in wide and _takes(child, name)

    names = [name for name, child in module.named_modules() if takes(child, name)]
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    convert_to_float8_training(module, config=config, module_filter_fn=takes)
    return [module.get_submodule(name) for name in names]


def require_float8(device: torch.device) -> None:
    """Raises InputError: torchao is not installed, or the GPU has no float8."""
    logging.disable(logging.WARNING)  # torchao warns of kernels that it cannot load
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise InputError(
            "precision is 'fp8', which needs torchao; pip install 'megatrain[fp8]'"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    gpu = torch.get_device_module(device)
    if device.type == "cuda" and gpu.get_device_capability(device) < _CAPABILITY:
        raise InputError(
            f"precision is 'fp8', but {gpu.get_device_name(device)} has no float8 products "
            "(compute capability 8.9 or newer has); take bf16"
        )


@contextmanager
def in_own_type(converted: list[nn.Module]) -> Iterator[None]:
    """Within this context modules that were converted compute in the type of their inputs.

    One scale serves all tokens that are computed together, so in float8 the output for one of them
    changes with the others, and a comparison of single tokens would prove nothing.
    """
    kinds = [type(module) for module in converted]
    for module in converted:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module, kind in zip(converted, kinds, strict=True):
            module.__class__ = kind


def _takes(module: nn.Module, name: str) -> bool:
    """True for a plain linear module, no router, of sizes that float8 products can have."""
    if type(module) is not nn.Linear or name.rpartition(".")[2] in ROUTERS:
        return False
    return "forward" not in vars(module) and all(
        size % _MULTIPLE == 0 for size in module.weight.shape
    )
