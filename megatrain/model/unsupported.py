"""Refuses models that cannot be streamed, for their settings, patched code, or state.

Training in micro-batches, layer by layer, runs the forward around the layers more often than plain
training, and in another order: it must compute the same in each run. State that a model keeps from
one run of its forward to the next is found here.
"""

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from megatrain.compat import torch as compat
from megatrain.compat.torch import pytree
from megatrain.compat.transformers import attention_of, configs
from megatrain.errors import Unsupported
from megatrain.model.capture import Capture, stop_at_layers
from megatrain.model.fingerprint import Reader, value_of
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.sizes import most_positions
from megatrain.model.spec import PROBE_IDS, PROBE_SHAPE
from megatrain.model.token_chunks import draws
from megatrain.model.zeros import ZeroProducts, zero_pages


def refuse_settings(config: PreTrainedConfig) -> None:
    """Raises Unsupported: settings change the layers that run, or weights, outside the engine."""
    if "flex_attention" in {attention_of(part) for _, part in configs(config)}:
        raise Unsupported(
            "attn_implementation is flex_attention, whose block masks the engine cannot follow; "
            "take sdpa, or another one"
        )
    interval = getattr(config, "rescale_every", 0)  # of RWKV
    if 0 < interval <= config.get_text_config(decoder=True).num_hidden_layers:
        raise Unsupported(
            f"rescale_every is {interval} in the model's configuration: the forward then changes "
            "weights outside of training; set rescale_every to 0 (only fp16 needs another value)"
        )
    for name, value in layer_drops(config).items():
        if isinstance(value, float) and value > 0:
            raise Unsupported(
                f"{name} is {value} in the model's configuration: layers left out at random are "
                "not supported; set it to 0"
            )


def layer_drops(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings for layers that are skipped at random, by Python's generator, even if 0."""
    settings = vars(config) | vars(config.get_text_config(decoder=True))
    return {name: value for name, value in settings.items() if "layerdrop" in name}


def refuse_rounding(
    types: Mapping[str, torch.dtype], gathered: Iterable[str], dtype: torch.dtype
) -> None:
    """Raises Unsupported: a table's rows would be in `dtype` where transformers keeps float32.

    Args:
        types: of all parameters, as `from_pretrained` gives them in `dtype`.
        gathered: names of tables whose rows are looked up.
    """
    for name in gathered:
        if types.get(name, dtype).itemsize > dtype.itemsize:
            raise Unsupported(
                f"transformers computes with {name} in float32 whatever the model's dtype, and "
                "here the rows of tables would be bf16; set precision to fp32"
            )


def refuse_grad_modes(layer: nn.Module, path: str) -> None:
    """Raises Unsupported: a layer's code asks for gradients, without which layers run first."""
    kinds = {kind for module in layer.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] in ("torch", "transformers", "peft", "torchao"):
            continue
        for function in filter(callable, vars(kind).values()):
            names = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())
            if asks := {"is_grad_enabled", "requires_grad"}.intersection(names):
                raise Unsupported(
                    f"in {path} the code of {kind.__name__} reads {min(asks)}: layers run without "
                    "gradients first and again with them; let it depend on self.training"
                )


def refuse_weights(model: nn.Module) -> None:
    """Raises Unsupported: weights are in fp64, of other types, have hooks, or share memory."""
    for name, parameter in model.named_parameters():
        problem = None
        if parameter.dtype.itemsize > 4:
            problem = f"is {parameter.dtype}"
        elif type(parameter) is not nn.Parameter:
            problem = f"is a {type(parameter).__name__}"
        elif compat.has_gradient_hooks(parameter):
            problem = "has a hook of its gradient"
        if problem is not None:
            remedy = "convert it to a plain nn.Parameter of at most 32 bits, without hooks"
            raise Unsupported(f"{name} {problem}; {remedy}")
    # In plain training, an update of a weight would change other tensors with its memory.
    attributes = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **compat.buffers_of(module)}.items()
        if isinstance(value, Tensor)
    ]
    tensors = {id(t): (n, t) for n, t in [*model.named_parameters(), *attributes]}
    spans = []
    for name, tensor in tensors.values():
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in strides)
            end = tensor.data_ptr() + elements * tensor.itemsize
            spans.append((tensor.data_ptr(), end, name, isinstance(tensor, nn.Parameter)))
    last_end, last_name, last_is_weight = 0, "", False  # of the span that ends last so far
    for start, end, name, is_weight in sorted(spans):
        if start < last_end and (is_weight or last_is_weight):
            raise Unsupported(
                f"{name} has the memory of {last_name}; weights must not share memory"
            )
        if end > last_end:
            last_end, last_name, last_is_weight = end, name, is_weight


def refuse_behaviour(model: nn.Module) -> None:
    """Raises Unsupported: a module has hooks, or weights that are not registered."""
    if compat.has_global_hooks():
        raise Unsupported("a hook of every module is registered with torch; remove it")
    refuse_hooks(model)
    reader = Reader(model)
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for name, _ in reader.attributes(module):
            if reader.strays:  # `attributes` has just met it
                raise Unsupported(
                    f"{where}.{name} holds a weight {list(reader.strays[0].shape)} that is not a "
                    "parameter there; register it"
                )


def refuse_hooks(model: nn.Module) -> None:
    """Raises Unsupported: a module has a hook, or a forward that is not of its class or ours."""
    for path, module in model.named_modules():
        names = (*compat.FORWARD_HOOKS, *compat.BACKWARD_HOOKS)
        registered = [vars(module).get(name) or {} for name in names]
        hooks = [hook for by_number in registered for hook in by_number.values()]
        # transformers' own hooks record hidden states, and make embeddings require gradients.
        has_hook = not all(_is_of(hook, "transformers") for hook in hooks)
        is_ours = "forward" not in vars(module) or _is_of(vars(module)["forward"], "megatrain")
        if has_hook or not is_ours:
            problem = "hook" if has_hook else "forward of its own"
            raise Unsupported(
                f"{path or type(model).__name__} has a {problem}, which is not supported: remove "
                f"it, or let a subclass of {type(module).__name__} do what it does"
            )


def _is_of(function: Any, package: str) -> bool:
    return str(getattr(function, "__module__", "")).startswith(f"{package}.")


@dataclass(frozen=True)
class Change:
    """An attribute or a buffer of a module that a forward has changed."""

    module: nn.Module
    name: str
    path: str

    def refusal(self) -> Unsupported:
        return Unsupported(
            f"its forward changes {self.path} as it runs; a model that keeps state of its own is "
            "not supported"
        )


class Watch:
    """Finds attributes and buffers of modules that a forward changes.

    A model that reads these computes something else after a batch than before it: layers that run
    again in the backward, for every micro-batch, would differ from plain training.
    """

    def __init__(self, module: nn.Module, path: str, idle: Collection[nn.Module] = ()) -> None:
        """Args: `idle`: parts of the module that do not run: they are ignored."""
        self.module, self.path = module, path
        self._idle = {id(part) for outer in idle for part in outer.modules()}
        self.before = dict(self._state())

    def changes(self) -> list[Change]:
        """Attributes and buffers that are new, or have changed since the start."""
        modules = dict(self.module.named_modules())
        return [
            Change(modules[path], name, ".".join(filter(None, (self.path, path, name))))
            for (path, name), value in self._state()
            if self.before.get((path, name)) != value
        ]

    def _state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        reader = Reader(self.module, by_identity=True)
        for path, module in self.module.named_modules():
            if id(module) in self._idle:
                continue
            for name, value in reader.attributes(module):
                yield (path, name), value
            for name, buffer in compat.buffers_of(module).items():
                yield (path, name), reader.of(buffer)


def settle(capture: Capture, shapes: Mapping[str, torch.Size]) -> bool:
    """Run a model until its modules have all that first forwards set, such as frequencies.

    Returns True if its forward calls the layers of the stack.

    Raises Unsupported: it sets other objects than tensors, or these depend on the first batch.
    """
    in_stack = {id(module) for layer in capture.layers for module in layer.modules()}
    outer = [module for module in capture.model.modules() if id(module) not in in_stack]
    watch = Watch(capture.model, "", capture.layers)
    states = [(vars(m).copy(), compat.buffers_of(m).copy()) for m in outer]
    reached, changes = _run_to_the_layers(capture, shapes, weight=0.0, watch=watch)
    if not changes:
        return reached
    first_values = [_value(change) for change in changes]
    for module, (attributes, buffers) in zip(outer, states, strict=True):
        vars(module).clear()
        vars(module).update(attributes)
        compat.buffers_of(module).clear()
        compat.buffers_of(module).update(buffers)
    initial_values = [_value(change) for change in changes]
    # With other weights and tokens the model must set the same values again.
    _run_to_the_layers(capture, shapes, weight=torch.nan, watch=watch)
    for change, initial, first in zip(changes, initial_values, first_values, strict=True):
        may_be_set = initial is None or change.name in compat.buffers_of(change.module)
        if not may_be_set or first is None or _value(change) != first:
            raise change.refusal()
    return reached


def _value(change: Change) -> Any:
    """The present value of a change, to compare; None: it is no tensor."""
    value = getattr(change.module, change.name, None)
    return value_of(value) if isinstance(value, Tensor) else None


def _run_to_the_layers(
    capture: Capture, shapes: Mapping[str, torch.Size], weight: float, watch: Watch
) -> tuple[bool, list[Change]]:
    """True if short rows reach the layers; the changes by short rows and by the last positions."""
    weights = {
        name: zero_pages(shape) if weight == 0 else torch.full((), weight).expand(shape)
        for name, shape in shapes.items()
    }
    short = {"input_ids": PROBE_IDS.remainder(4 if weight == 0 else 3)}
    longest, tokens = most_positions(capture.model.config) or 0, PROBE_SHAPE[1]
    with torch.no_grad():
        reached = capture.forward(stop_at_layers, weights, capture.inputs(short)) is True
        if has_later := longest > tokens and capture.takes("position_ids"):
            last = {"position_ids": torch.arange(longest - tokens, longest).expand(PROBE_SHAPE)}
            with suppress(Exception):  # not every model takes positions that begin anywhere
                capture.forward(stop_at_layers, weights, capture.inputs(short | last))
        changes = watch.changes()
        if changes and has_later:
            capture.forward(stop_at_layers, weights, capture.inputs(short))
            changes = watch.changes()
    return reached, changes


def try_kind(kind: LayerTemplate, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Run a kind of layer with weights of zeros; set its `example`, `random` and `states`.

    Raises Unsupported: it reads what an earlier run has left: NaN put there shows in its outputs.
    Weights of zeros may make NaN themselves, divided by their norm: a run with ones then decides.
    """
    buffers = dict(module.named_buffers())
    zeros = {name: zero_pages(p.shape) for name, p in module.named_parameters()}
    weights = zeros | buffers
    watch = Watch(kind.module, path)
    versions = {name: _written(tensor) for name, tensor in weights.items()}
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    input_versions = [_written(tensor) for tensor in inputs]
    randomness = OtherRandomness()

    def run() -> None:
        kind.example = kind.call(weights, args, kwargs)

    with torch.no_grad(), randomness, ZeroProducts(zeros.values()):
        kind.random = draws(run, zeros)
        changes = watch.changes()
        kind.states = [(change.module, change.name) for change in changes]
        if changes and _are_read(changes, partial(kind.call, weights, args, kwargs)):
            # Experts, which are three-dimensional and may be large, stay zeros.
            ones = {n: torch.ones(z.shape) if z.dim() <= 2 else z for n, z in zeros.items()}
            if _are_read(changes, partial(kind.call, ones | buffers, args, kwargs)):
                raise changes[0].refusal()
    for name, tensor in (zeros | buffers).items():
        if weights[name] is not tensor or _written(tensor) != versions[name]:
            kind_of_tensor = "buffer" if name in buffers else "parameter"
            raise Unsupported(f"the forward of {path} changes its {kind_of_tensor} {name}")
    if input_versions != [_written(tensor) for tensor in inputs]:
        raise Unsupported(
            f"the forward of {path} changes in place what it is given; let it copy that"
        )
    randomness.refuse()


def _written(tensor: Tensor) -> tuple[int, int]:
    """A key that changes when a tensor is written to, or gets other memory."""
    return compat.memory_of(tensor), compat.version_of(tensor)


def _are_read(changes: Iterable[Change], run: Callable[[], Iterable[Any]]) -> bool:
    """True if NaN in place of changed attributes shows in the outputs of `run`."""
    for change in changes:
        value = getattr(change.module, change.name, None)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            raise change.refusal()
        setattr(change.module, change.name, torch.full_like(value, torch.nan))
    with sdpa_kernel(SDPBackend.MATH):  # the output of a fused kernel may hide NaN in its input
        tensors = [value for value in run() if isinstance(value, Tensor)]
    return any(bool(t.isnan().any()) for t in tensors if t.is_floating_point())


def refuse_state(watch: Watch, run: Callable[[], Iterable[Any]]) -> None:
    """Raises Unsupported: a forward has changed state of modules that its next run may depend on.

    A run may change buffers that no checkpoint holds, if each run writes them before it reads them.
    Args: `run`: runs the forward again and returns all its outputs.
    """
    changes = watch.changes()
    for change in changes:
        is_buffer = change.name in compat.buffers_of(change.module)
        if not is_buffer or change.name in change.module.state_dict():
            raise change.refusal()
    if changes and _are_read(changes, run):
        raise changes[0].refusal()


class OtherRandomness(TorchFunctionMode):
    """Finds uses of random numbers that a recomputation would not repeat.

    They are Python's, numpy's, or of a generator of torch that is not the default one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before, self._is_own = self._state(), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._is_own |= kwargs.get("generator") not in (None, torch.default_generator)
        return func(*args, **kwargs)

    @staticmethod
    def _state() -> tuple:
        _, numbers, *rest = numpy.random.get_state(legacy=True)
        return random.getstate(), list(numbers), rest

    def refuse(self) -> None:
        """Raises Unsupported: such random numbers have been used since the start."""
        if self._is_own or self._state() != self._before:
            whose = "a generator of its own" if self._is_own else "Python's or numpy's generator"
            raise Unsupported(
                f"its forward draws random numbers from {whose}, which its recomputation would not "
                "draw again; use torch's default one"
            )
