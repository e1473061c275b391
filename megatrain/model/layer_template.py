"""Templates: one stateless module per kind of layer, called with streamed weights, and compiled."""

import functools
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.compat.torch import (
    buffers_of,
    keep_tuning_off_the_host,
    let_triton_launch,
    pytree,
    recomputing,
)
from megatrain.errors import RunFailed
from megatrain.model.fingerprint import INDEX_ATTRIBUTES
from megatrain.model.routers import router_sums
from megatrain.model.token_chunks import ChunkedOverTokens, parts
from megatrain.placement import Saves

_log = logging.getLogger(__name__)

_numbers = count()  # of compiled functions in this process

# Share of a layer's activations that a compiled graph may save; the rest is recomputed. Half of
# them are about the outputs of matrix products and attention.
KEPT_SHARE = 0.5

# Purposes of a call, which are compiled separately: name in the log, share that may be saved.
_PURPOSES = {
    "forward": ("forward without a backward", None),
    "recompute": ("backward", None),
    "repeat": ("forward and backward", 0.0),
    "keep": ("kept graph", KEPT_SHARE),
    "keep_all": ("graph kept whole", None),
}


@dataclass
class LayerTemplate:
    """Layers that compute the same function of their weights."""

    module: nn.Module  # the template; parameters on the meta device, buffers real
    output_spec: Any = None  # pytree of a call's return value and of its additions to containers
    example: list[Any] = field(default_factory=list)  # flat outputs of the structure run (zeros)
    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)  # calls by purpose
    routes: bool = False  # True if a call's last output is its routers' sums (model/routers.py)
    random: bool = False  # True if a call uses random numbers in training
    states: list[tuple[nn.Module, str]] = field(default_factory=list)  # attributes that a call sets

    def call(
        self,
        weights: dict[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        saves: Saves | None = None,
        counted_N: Tensor | None = None,
    ) -> list[Tensor | Any]:
        """The layer's outputs as a flat list; `saves`: the tensors that a kept graph saves.

        Values that the layer puts into its arguments' containers follow its return value, then
        its routers' sums, if any, over the tokens that count (`counted_N`).
        """
        purpose = "recompute" if torch.is_grad_enabled() else "forward"
        if saves == "nothing":
            purpose = "repeat"
        elif saves is not None:
            # Within a budget, torch's partitioner may compute any operation again in the backward
            # (torch/_functorch/partitioners.py, `choose_saved_values_set`), a random one with other
            # numbers than in the forward: GPT-2's gradient was off by 30 %. Without a budget it
            # never computes random operations or attention again.
            purpose = "keep_all" if saves == "all" or self.random else "keep"
        function = self.compiled.get(purpose, _apply)
        output = function(self.module, weights, args, kwargs, counted_N)
        leaves, self.output_spec = pytree.tree_flatten(output)
        self.routes = bool(output[2])
        for module, name in self.states:
            if isinstance(value := getattr(module, name), Tensor):
                setattr(module, name, value.detach())  # else the tensor keeps the call's graph
        return leaves

    @property
    def repeats(self) -> bool:
        """True if the layer may keep a graph that saves only its arguments (`saves="nothing"`).

        Its backward is compiled together with the recomputation, which leaves out operations that
        only the layer's result needs: an MLP's last product, a quarter of a layer's forward.
        """
        return bool(self.compiled) and not self.random

    def compile(self, name: str) -> None:
        """Compile the call separately for each purpose (torch.compile, at the first call)."""
        for purpose, (log_name, share) in _PURPOSES.items():
            function = compile_and_tell(_apply, f"{name} ({log_name})", purpose)
            # The budget is read when a function is compiled, at the first call of a shape.
            self.compiled[purpose] = function if share is None else recomputing(share)(function)

    def tile(self, tokens: int, name: str, *, compiled: bool) -> None:
        """Run parts that act on each token alone in tiles of `tokens`; compile only those parts."""

        def fast(function: Callable[..., Any], what: str) -> Callable[..., Any]:
            return compile_and_tell(function, f"{name}, {what}") if compiled else function

        for part in parts(self.module):  # the first call tries each with its weights
            part.forward = ChunkedOverTokens(part, tokens, fast)


def _apply(
    module: nn.Module,
    weights: dict[str, Tensor],
    args: tuple,
    kwargs: dict,
    counted_N: Tensor | None = None,
) -> Any:
    """The layer's output, its additions to containers in its arguments, its routers' sums."""
    shared = containers(args, kwargs)
    copies = [dict(container) for container in shared]
    output = functional_call(module, weights, args, kwargs)
    added: list[dict[Any, Any]] = []
    for container, old in zip(shared, copies, strict=True):
        added.append({key: v for key, v in container.items() if old.get(key) is not v})
    return output, added, router_sums(module, counted_N)


def containers(args: tuple, kwargs: dict[str, Any]) -> list[MutableMapping]:
    """Mappings among a layer's arguments, in which layers may pass state to others.

    Their classes are registered with torch's pytree, which then sees the values inside.
    """
    mappings = [v for v in (*args, *kwargs.values()) if isinstance(v, MutableMapping)]
    for cls in {type(container) for container in mappings if pytree.tree_is_leaf(container)}:
        pytree.register_pytree_node(
            cls,
            lambda mapping: (list(mapping.values()), tuple(mapping)),
            lambda values, keys, cls=cls: cls(zip(keys, values, strict=True)),  # type: ignore[misc]
        )
    return mappings


def move_buffers(
    module: nn.Module, device: torch.device, types: Mapping[str, torch.dtype] | None = None
) -> None:
    """Move every buffer of `module`, and no parameter; `types`: new dtypes by buffers' names."""
    for path, child in module.named_modules():
        for name, buffer in buffers_of(child).items():
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                dtype = (types or {}).get(full, buffer.dtype)
                buffers_of(child)[name] = buffer.to(device=device, dtype=dtype)


class NumberRead(RunFailed):
    """A layer's forward has read the layer's number."""

    count = 0  # of all reads, as a forward may catch the exception

    def __init__(self, name: str) -> None:
        NumberRead.count += 1
        super().__init__(
            f"a layer's forward reads its {name}, which it did not when its structure was found "
            "out; such a model cannot be trained"
        )


def without_index(module: nn.Module) -> nn.Module:
    """Hide the layer numbers of `module` in place: reading one raises `NumberRead`."""
    for child in module.modules():
        names = tuple(name for name in INDEX_ATTRIBUTES if name in vars(child))
        for name in names:
            del vars(child)[name]
        if names:
            child.__class__ = _unnumbered(type(child), names)  # type: ignore[arg-type]
    return module


@functools.cache
def _unnumbered(cls: type, names: tuple[str, ...]) -> type:
    def hidden(name: str) -> property:
        def read(self: nn.Module) -> Any:
            raise NumberRead(name)

        return property(read)

    return type(cls.__name__, (cls,), {name: hidden(name) for name in names})


def compile_and_tell(function: Callable[..., Any], what: str, name: str = "") -> Callable[..., Any]:
    """`function` through torch.compile; the first call, which may take a minute, is logged.

    Sizes of the first call keep their own graphs: after a call with other sizes, torch.compile
    would make graphs for any size, and use these for the first sizes as well.

    Args: `name`: in torch's own messages and traces; by default the function's.
    """
    let_triton_launch()
    keep_tuning_off_the_host()
    code_name = f"{name or getattr(function, '__name__', what)}_{next(_numbers)}"
    usual, any_size = (torch.compile(_with_own_code(function, code_name)) for _ in range(2))
    first_sizes: dict[int, list[torch.Size]] = {}  # by the number of tensors, which buffers change

    def call(*args: Any, **kwargs: Any) -> Any:
        # Sizes of integer tensors do not count: the number of documents differs every time.
        leaves = pytree.tree_leaves((args, kwargs))
        sizes = [x.shape for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        if not first_sizes:
            _log.info("compiling %s...", what)
        is_usual = first_sizes.setdefault(len(sizes), sizes) == sizes
        return (usual if is_usual else any_size)(*args, **kwargs)

    return call


def _with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of a function or a method under another name, with a new code object.

    torch.compile keeps compiled graphs by code object: kinds of layers with the same one would use
    each other's graphs, and reach the limit on their number. It also remembers, by file, line and
    name, sizes that have varied, and then compiles kernels for any size (torch/_dynamo/pgo.py): a
    process's second model, with functions of the same name, would get these slower kernels.
    """
    if isinstance(function, MethodType):
        return MethodType(_with_own_code(function.__func__, name), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name=name)
    defaults, closure = function.__defaults__, function.__closure__
    copied = FunctionType(code, function.__globals__, name, defaults, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
