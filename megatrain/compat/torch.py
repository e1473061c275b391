"""All private parts of torch that the package uses."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from operator import attrgetter
from threading import Thread
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "pytree"]

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold its hooks."""

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
GROUPED_PRODUCT = torch._grouped_mm

without_modes = dispatch._disable_current_modes
without_torch_function = torch._C.DisableTorchFunction
current_mode = dispatch._get_current_dispatch_mode

_MOST_COPIED_BYTES = 1 << 30

# torch 2.13 renames these functions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.library.custom_op("megatrain::contiguous_copy", mutates_args=())
def contiguous_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy. (Inductor may choose another layout for `Tensor.contiguous()`.)"""
    return tensor.clone(memory_format=torch.contiguous_format)


contiguous_copy.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
contiguous_copy.register_autograd(lambda ctx, gradient: gradient)


def scaled_product(rows: Tensor, columns: Tensor, scales_N1: Tensor, scales_1O: Tensor) -> Tensor:
    """The product of float8 codes `[N, I]` and `[I, O]` with scales of rows and columns, in bf16.

    A CPU computes it in fp32: before torch 2.13 its `_scaled_mm` takes no scales of rows.
    """
    if not rows.is_cuda:
        return (rows.float() @ columns.float() * scales_N1 * scales_1O).bfloat16()
    sums: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(rows, columns, scales_N1, scales_1O, **sums)


def host_alias(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Memory of Apple's GPU as a flat CPU tensor; the caller orders accesses of GPU and CPU."""
    alias = torch.mps._host_alias_storage(storage)
    return torch.empty(0, dtype=dtype).set_(alias, 0, (alias.nbytes() // dtype.itemsize,), (1,))


def memory_of(tensor: Tensor) -> int:
    """A key that tensors of one allocation share, also on the meta device."""
    return tensor.untyped_storage()._cdata


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The number of writes to a tensor."""
READS_OF_VALUES = {
    "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "item",
    "numpy", "tolist",
}  # fmt: skip
"""Names of torch's functions that read a tensor's values for Python."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
packet_of: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""The schema (name and arguments) of an operation in a dispatch mode, and its overload packet."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's own dictionaries, which may be changed; a child with two names is in them twice."""


def versions_of(named: Mapping[str, Any]) -> dict[str, int]:
    """The versions of the tensors among values; for modes of functions this is no use of them."""
    with without_torch_function():
        return {name: version_of(v) for name, v in named.items() if isinstance(v, Tensor)}


def has_gradient_hooks(parameter: Tensor) -> bool:
    """True if a hook runs when the parameter's gradient is computed."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_global_hooks() -> bool:
    """True if a hook for all modules is registered."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in kinds)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone.

    An operation's threads wait for each other: for milliseconds while updates take the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def has_saved_tensor_hooks() -> bool:
    """True within `torch.autograd.graph.saved_tensors_hooks` of any kind."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def recomputing(share: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: code compiled within the function's calls saves `share` of its activations."""
    return torch._functorch.config.patch(activation_memory_budget=share)


@cache
def can_compile() -> bool:
    """True if Triton can build kernels: it is installed, and there is a C compiler."""
    compiler = any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang"))))
    return compiler and importlib.util.find_spec("triton") is not None


@contextmanager
def importing_compiler() -> Iterator[None]:
    """Within this context another thread imports torch.compile's modules, which takes seconds."""
    thread = Thread(target=importlib.import_module, args=("torch._inductor.compile_fx",))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def let_triton_launch() -> None:
    """Let Triton launch compiled kernels, which releases Python's lock; torch's launcher does not.

    A launch blocks while the GPU's queue is full, and the GPU may be waiting for a host thread that
    needs the lock: an update, or a save's writers for which an update waits. That was a deadlock
    (torch 2.11, H200; torch/csrc/inductor/static_launcher/cuda.cpp).
    """
    import torch._inductor.config as inductor

    inductor.use_static_cuda_launcher = False


@cache  # the function below is wrapped once
def keep_tuning_off_the_host() -> None:
    """Let compiled kernels that overwrite more than a GiB use their first configuration, untimed.

    To time configurations, Inductor copies the overwritten tensors to pinned host memory, in sizes
    rounded up to a power of two. The attention logits of gpt-oss at 4,096 tokens took over 16 GiB
    of a host that had been planned to the last byte, and the process was killed.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    benchmark = CachingAutotuner.benchmark_all_configs

    def benchmark_all_configs(tuner: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        named = dict(zip(tuner.fn.arg_names, args, strict=False)) | kwargs
        overwritten = (named.get(name) for name in tuner.mutated_arg_names)
        if any(isinstance(x, Tensor) and x.nbytes > _MOST_COPIED_BYTES for x in overwritten):
            return {tuner.launchers[0]: 0.0}
        return benchmark(tuner, *args, **kwargs)

    setattr(CachingAutotuner, "benchmark_all_configs", benchmark_all_configs)  # noqa: B010


def mark_dynamic(tensor: Tensor, dim: int = 0) -> None:
    """Let torch.compile take a tensor of any length in a dimension."""
    import torch._dynamo  # the import takes a second

    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def not_compiled() -> AbstractContextManager[Any]:
    """A context in which functions that a model's own code has compiled run uncompiled."""
    loaded = "torch._dynamo" in sys.modules  # else nothing is compiled
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def for_many_shapes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Allow 64 recompilations of a compiled function; after torch's 8 it would run eagerly."""
    return torch._dynamo.config.patch(recompile_limit=64)(compiled)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor | None,
    longest: int,
    window: int,
    scale: float | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of `[N, H, D]` within documents, whose bounds are `edges` (int32), on a GPU.

    With `causal` a token sees the last `window` tokens, itself included, or all if `window` is 0.
    Also returns the log-sum-exp of the softmax, `[H, N]` in fp32. Without edges each row of
    `[B, T, H, D]` is a document, and the log-sum-exp is `[B, H, T]`.
    """
    longest = query.shape[1] if edges is None else longest
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, edges, edges, longest, longest, 0.0, causal, False,
        scale=scale, **_window(window),
    )  # fmt: skip
    return out, sums


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    edges: Tensor | None,
    longest: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of causal `flash_attention`."""
    longest = query.shape[1] if edges is None else longest
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, out, sums, edges, edges, longest, longest, 0.0, True,
        seed, seed.new_zeros(()), scale=scale, **_window(window),
    )  # fmt: skip


def _window(window: int) -> dict[str, int | None]:
    """The kernel's arguments for a window of so many tokens; 0: no window."""
    return {
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
    }


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """True if a learning-rate schedule has been made for an optimizer."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
