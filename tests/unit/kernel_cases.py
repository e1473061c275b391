"""What the kernel tests share: implementations to try, bit comparison, one AdamW problem."""

import platform

import pytest
import torch
from torch import Tensor

from megatrain.kernels import reference

try:
    from megatrain.kernels import native
except ImportError:
    native = None

BEST_FIRST = ("avx512", "avx2", "baseline")
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
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "") -> None:
    differing = int((bits(found) != bits(expected)).sum())
    assert differing == 0, f"{what}: {differing} of {found.numel()} elements differ"


def randn(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def gradient(size: int, step: int) -> Tensor:
    """Gradients over seven orders of magnitude, as training has them."""
    exponent = randn(size, 1000 + step).clamp(-3, 3)
    return randn(size, step) * 10**exponent


def split_state(size: int) -> dict[str, Tensor]:
    """Bf16 weights, remainder and zero moments of a random fp32 master."""
    state = {
        "weights": torch.empty(size, dtype=torch.bfloat16),
        "remainder": torch.empty(size, dtype=torch.int16),
        "exp_avg": torch.zeros(size),
        "exp_avg_sq": torch.zeros(size),
    }
    reference.split(randn(size, 0) * 0.02, state["weights"], state["remainder"])
    return state


def whole_state(size: int) -> dict[str, Tensor | None]:
    """Fp32 weights and zero moments, of the same master."""
    return {
        "weights": randn(size, 0) * 0.02,
        "remainder": None,
        "exp_avg": torch.zeros(size),
        "exp_avg_sq": torch.zeros(size),
    }


def joined(state: dict[str, Tensor]) -> Tensor:
    master = torch.empty_like(state["exp_avg"])
    reference.join(state["weights"], state["remainder"], master)
    return master
