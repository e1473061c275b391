"""What the kernel tests share: implementations to try, bit comparison, one AdamW problem."""

import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW
from megatrain.kernels import reference
from megatrain.kernels.states import TileRange, UpdateOptions, adamw_scalars

try:
    from megatrain.kernels import native
except ImportError:
    native = None

BEST_FIRST = ("avx512vbmi", "avx512", "avx2", "baseline")
HYPER = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

needs_native = pytest.mark.skipif(native is None, reason="the native library is not built")
implementations = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(reference, id="reference"),
        pytest.param(native, id="native", marks=needs_native),
    ],
)


@pytest.fixture(params=BEST_FIRST)
def instruction_set(request):
    """Each instruction set of the native library in turn, the best one again afterwards."""
    if native is None or not native.use_instruction_set(request.param):
        pytest.skip(f"no native kernels for {request.param} here")
    yield request.param
    for name in BEST_FIRST:
        if native.use_instruction_set(name):
            break


@pytest.fixture
def exact_roots(monkeypatch):
    """Torch's optimizer with correctly rounded roots, which MKL's are not."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x.double().sqrt_().float())


def fuses_like_torch(instruction_set: str) -> bool:
    """Whether these kernels and this torch agree on fused multiply-adds."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    torch_fuses = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return torch_fuses == (instruction_set != "baseline")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """The planes that there are, scales one by one."""
    scales = {f"scale {i}": scale for i, scale in enumerate(state["scales"])}
    return {n: plane for n, plane in state.items() if torch.is_tensor(plane)} | scales


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "") -> None:
    differing = int((bits(found) != bits(expected)).sum())
    assert differing == 0, f"{what}: {differing} of {found.numel()} elements differ"


def randn(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def gradient(size: int, step: int) -> Tensor:
    """Gradients over seven orders of magnitude, as training has them."""
    return _gradient(size, step).clone()


@cache
def _gradient(size: int, step: int) -> Tensor:
    exponent = randn(size, 1000 + step).clamp(-3, 3)
    return randn(size, step) * 10**exponent


def zero_moments(size: int, kind: str) -> dict[str, Any]:
    """Zero moments as AdamW's `states` call them."""
    planes = AdamW(states=kind).state_planes
    first, second, *scales = (torch.zeros(-(-size // p.group_size), dtype=p.dtype) for p in planes)
    return {"exp_avg": first, "exp_avg_sq": second, "scales": scales}


def split_state(
    size: int, kind: str = "fp32", remainder: torch.dtype = torch.int16
) -> dict[str, Any]:
    """Bf16 weights, remainder and zero moments of a random fp32 master."""
    state = {
        "weights": torch.empty(size, dtype=torch.bfloat16),
        "remainder": torch.empty(size, dtype=remainder),
        **zero_moments(size, kind),
    }
    reference.split(randn(size, 0) * 0.02, state["weights"], state["remainder"])
    return state


def whole_state(size: int, kind: str = "fp32") -> dict[str, Any]:
    """Fp32 weights and zero moments, of the same master."""
    return {"weights": randn(size, 0) * 0.02, "remainder": None, **zero_moments(size, kind)}


def adamw(
    kernels: Any, weights: Tensor, remainder: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor,
    scales: Sequence[Tensor], grad: Tensor, step: int, beta1: float, beta2: float,
    at: int = 0, grad_scale: float = 1.0, threads: int = 1, **group: float,
) -> None:  # fmt: skip
    """One AdamW update of a state by an implementation."""
    by = adamw_scalars(exp_avg.dtype, step, group | {"betas": (beta1, beta2)})
    tile = TileRange(weights, remainder, [exp_avg, exp_avg_sq, *scales], grad)
    kernels.update("adamw", tile, by, UpdateOptions(at, step, grad_scale, threads))


def joined(state: dict[str, Any]) -> Tensor:
    master = torch.empty(len(state["weights"]))
    reference.join(state["weights"], state["remainder"], master)
    return master
