"""Products in float8: of all parameters by torchao's recipe, of a frozen base by stored codes.

**All parameters**: weights, inputs and gradients of `nn.Linear` are cast for each product (e4m3,
gradients e5m2), with one scale for a whole tensor, from its largest value at that moment; results,
weights and their gradients stay bf16 (https://github.com/pytorch/ao/tree/main/torchao/float8).

**A frozen base under an adapter**: weights are e4m3 codes with a scale for each row (output), and
the same codes transposed. Inputs are quantised by rows (tokens): `y = (q(x) codes^T) s_x s_w`.
Their gradient is multiplied by the outputs' scales, then quantised by rows: `dx = (q(dy s_w) codes)
s_dy`. It is e4m3, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, 3.3.2). Operands and fast
sums are torchao's `rowwise`.

Heads, embeddings, routers, adapters and experts that are no `nn.Linear` are computed in bf16.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import scaled_product
from megatrain.device import compute_capability
from megatrain.errors import InputError
from megatrain.model.adapters import adapted
from megatrain.model.build import loaded_types
from megatrain.model.spec import ModelSpec
from megatrain.tile.formats import fp8_rows

_MULTIPLE = 16  # of both sizes of a weight, for the GPU's float8 products
_CAPABILITY = (8, 9)  # Ada and Hopper: the first GPUs with float8 products
ROUTERS = frozenset(("gate", "router"))  # modules whose rounding would choose other experts


class FrozenProduct(torch.autograd.Function):
    """`x [..., I]` times a frozen weight `[O, I]` of codes and scales (`turned`: transposed)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, turned: Tensor) -> Tensor:
        """`[..., O]`. Only the weight is saved: it has no gradient."""
        ctx.save_for_backward(scales, turned)
        return _product(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        scales, turned = ctx.saved_tensors
        return _product(dy * scales, turned, scales.new_ones(1, len(turned))), None, None, None


def _product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """`x [..., I]`, quantised by rows, times codes `[O, I]` with scales `[1, O]`."""
    quantised, row_scales = fp8_rows(x.reshape(-1, x.shape[-1]))
    y = scaled_product(quantised.contiguous(), codes.t(), row_scales[:, None], scales)
    return y.view(*x.shape[:-1], -1)


class FrozenLinear(nn.Linear):
    """A linear module that multiplies by float8 codes if it has them, else by its weight."""

    codes: Tensor | None  # `[O, I]`
    scales: Tensor  # `[1, O]`
    turned: Tensor  # the codes transposed

    def forward(self, x: Tensor) -> Tensor:
        if self.codes is None:
            return super().forward(x)
        y = FrozenProduct.apply(x, self.codes, self.scales, self.turned)
        return y if self.bias is None else y + self.bias


def frozen_operands(spec: ModelSpec) -> set[str]:
    """Names of the frozen weights under an adapter that products in float8 read as operands."""
    adapters, types = adapted(spec.capture.model), loaded_types(spec.capture.model, torch.bfloat16)
    base_names = {} if adapters is None else adapters.base_names
    frozen: set[str] = set()
    for layer in spec.layers:
        for path, module in layer.module.named_modules():
            name = f"{layer.name}.{path}.weight"
            is_frozen = _takes(module, path) and not module.weight.requires_grad
            if is_frozen and name in base_names and types.get(name) != torch.float32:
                frozen.add(name)
    return frozen


def use_frozen_linear(module: nn.Module, names: Iterable[str]) -> None:
    """Turn linear modules of a layer's template, by their weights' names, into `FrozenLinear`."""
    for name in names:
        linear = module.get_submodule(name.removesuffix(".weight"))
        linear.__class__ = FrozenLinear
        for operand in ("codes", "scales", "turned"):
            linear.register_buffer(operand, None)


def convert(module: nn.Module, device: torch.device, wide: Collection[str] = ()) -> list[nn.Module]:
    """Convert linear modules of a layer's template by torchao's recipe; returns them.

    Without a GPU values are cast, and products are computed in the dtype of the inputs.

    Args: `wide`: names of parameters that stay in fp32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def takes(child: nn.Module, name: str) -> bool:
        return f"{name}.weight" not in wide and _takes(child, name)

    names = [name for name, child in module.named_modules() if takes(child, name)]
    config = Float8LinearConfig(emulate=compute_capability(device) is None, pad_inner_dim=True)
    convert_to_float8_training(module, config=config, module_filter_fn=takes)
    return [module.get_submodule(name) for name in names]


def require_float8(device: torch.device) -> None:
    """Raises InputError: the GPU has no float8."""
    capability = compute_capability(device)
    if capability is not None and capability < _CAPABILITY:
        raise InputError(
            f"precision is 'fp8', but the GPU's compute capability is {capability[0]}."
            f"{capability[1]}, which has no float8 products (8.9 or newer has); take bf16"
        )


def require_torchao() -> None:
    """Raises InputError: torchao, by which all parameters are trained in float8, is missing."""
    logging.disable(logging.WARNING)  # torchao warns of kernels that it cannot load
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise InputError(
            "precision is 'fp8', which needs torchao; pip install 'megatrain[fp8]'"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _takes(module: nn.Module, name: str) -> bool:
    """True if a module is plain linear, no router, and of sizes that float8 products can have."""
    if type(module) is not nn.Linear or not ROUTERS.isdisjoint(name.split(".")):
        return False
    return "forward" not in vars(module) and all(
        size % _MULTIPLE == 0 for size in module.weight.shape
    )
