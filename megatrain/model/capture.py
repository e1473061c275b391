"""Runs a model's own forward, with every layer replaced by a recorder.

A run embeds, makes masks and rotary tables, and calls each recorder with the arguments of its
layer: all that is around the layers is transformers' code, whatever the family of the model.
"""

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from megatrain.base.changed import changed
from megatrain.compat.torch import READS_OF_VALUES, memory_of, not_compiled, pytree, versions_of
from megatrain.errors import InputError, Unsupported
from megatrain.model.layer_template import containers
from megatrain.model.media import NO_IDS, of_media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROLOGUE = -1  # the "visit" of all that runs before the first layer
MEDIA = -2  # the "visit" of the encoders of images and sounds
ADDED = -3  # the "visit" of tensors that a forward with images adds between two layers


@dataclass(frozen=True, order=True)
class Ref:
    """An activation by its origin: output leaf `leaf` of layer `visit`, or of the prologue."""

    visit: int
    leaf: int


FEATURES = Ref(MEDIA, 0)  # all features of a micro-batch's media, end to end


@dataclass(frozen=True)
class Sum:
    """A layer's argument: the sum of an activation and of what the forward adds to it."""

    activation: Ref
    added: Ref


@dataclass
class Call:
    """A layer's call: leaves of its arguments; activations are Refs or Sums, others are values."""

    leaves: list[Any]
    spec: Any

    @property
    def activations(self) -> list[Ref]:
        """The activations of earlier units among the arguments, each once."""
        leaves = [leaf.activation if isinstance(leaf, Sum) else leaf for leaf in self.leaves]
        return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Ref)))

    @property
    def entering(self) -> set[Ref]:
        """The arguments, or parts of them, that the prologue computes."""
        added = {leaf.added for leaf in self.leaves if isinstance(leaf, Sum)}
        return added.union(ref for ref in self.activations if ref.visit == PROLOGUE)

    def arguments(self, values: Mapping[Ref, Tensor]) -> tuple[tuple, dict[str, Any]]:
        """`(args, kwargs)` with each Ref and Sum replaced by its value."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Sum):
                return values[leaf.activation] + values[leaf.added]
            return values[leaf] if isinstance(leaf, Ref) else leaf

        return pytree.tree_unflatten(map(value, self.leaves), self.spec)


def identity(tensor: Tensor) -> Hashable:
    """A key that a tensor and its trivial views (`h[:, 0:]`) share; a detached view has another."""
    return *_memory(tensor), tensor.shape, tensor.stride(), tensor.requires_grad


def _memory(tensor: Tensor) -> tuple:
    """A key of the place of a tensor's first value, also for meta tensors."""
    return memory_of(tensor), tensor.storage_offset()


class Reached(Exception):
    """Raised with a result, by a recorder or after the trunk, to end a run; not an error."""


def stop_at_layers(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A handler of `Capture.forward` that ends a run at its first layer, with True."""
    raise Reached(True)


@dataclass
class Rows:
    """The embedding rows of one optimizer step, gathered once for all its micro-batches."""

    ids: Tensor  # `[B, T]` the micro-batch's token ids on the device
    index: Tensor  # `[B, T]` position of each token in the tables below
    tables: dict[str, Tensor]  # per gathered parameter `[U, D]`, U the distinct tokens of the step
    unique: Tensor  # `[U]` vocabulary id of each row (CPU, ascending)

    def position(self, token: int) -> int | None:
        """The index of a token's row; None: the step does not have the token."""
        index = int(torch.searchsorted(self.unique, token))
        is_there = index < len(self.unique) and int(self.unique[index]) == token
        return index if is_there else None

    def positions(self, ids: Tensor) -> Tensor:
        """The indices of the rows of `ids`, of any shape.

        Raises InputError: some are not among the step's tokens.
        """
        # Nearly always these are the batch's own ids; to compare others waits for the device.
        of_batch = _memory(ids) == _memory(self.ids) and ids.numel() == self.ids.numel()
        if of_batch and ids.is_contiguous():
            return self.index.view(ids.shape)
        unique_U = self.unique.to(ids.device)
        index = torch.searchsorted(unique_U, ids.contiguous()).clamp_(max=len(unique_U) - 1)
        missing = ids[unique_U[index] != ids]
        if len(missing):
            raise InputError(
                f"the model's forward looks up token {int(missing[0])}, which the batch does not "
                "hold; only models that embed the batch's own tokens can be trained"
            )
        return index


@dataclass
class Uses:
    """The tensors that a run used, by kind of use."""

    lookups: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (table, ids) of each one
    constants: set[tuple[int, int]] = field(default_factory=set)  # `table[row]`: table's id, row
    touched: set[int] = field(default_factory=set)  # ids of the input tensors of all operations
    # ids of inputs from which an operation but a lookup of rows computed tensors
    read: set[int] = field(default_factory=set)
    # by id, tensors that were put there, and all that are computed from them
    derived: dict[int, Tensor] = field(default_factory=dict)
    reads_values: bool = False

    def note(self, func: Any, arguments: Iterable[Any], result: Any, *, is_lookup: bool) -> None:
        """Note an operation; `is_lookup`: it copies rows of a table and computes nothing."""
        ids = {
            id(leaf)
            for x in arguments
            for leaf in ([x] if isinstance(x, Tensor) else pytree.tree_leaves(x))
        }
        self.touched |= ids
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors and not is_lookup:
            self.read |= ids
        if not ids.isdisjoint(self.derived):
            self.derived.update((id(tensor), tensor) for tensor in tensors)
            self.reads_values |= getattr(func, "__name__", "") in READS_OF_VALUES


# Settings of `F.embedding`; other values are refused.
_DEFAULTS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


class Lookups(TorchFunctionMode):
    """Sends embedding lookups of gathered tables to the step's own small tables."""

    def __init__(self, names: Mapping[int, str], rows: Rows | None, uses: Uses | None) -> None:
        super().__init__()
        self.names, self.rows, self.uses = names, rows, uses

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        row = None
        if func is Tensor.__getitem__:  # `table[row]` or `table[row, ...]`
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            row = first if type(first) is int else None
        if func is F.embedding:
            result = self._embedding(*args, **kwargs)
        elif row is not None:
            result = self._row(args[0], row, args[1])
        else:
            result = func(*args, **kwargs)
        if self.uses is not None:
            is_lookup = func is F.embedding or row is not None
            self.uses.note(func, (*args, *kwargs.values()), result, is_lookup=is_lookup)
        return result

    def _embedding(
        self, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.uses is not None:
            call = inspect.signature(F.embedding).bind(ids, weight, padding_idx, *args, **kwargs)
            for setting, default in _DEFAULTS.items():
                if (value := call.arguments.get(setting, default)) != default:
                    raise Unsupported(f"its forward looks up a table with {setting}={value}")
            self.uses.lookups.append((weight, ids))
        name = self.names.get(id(weight))
        if name is None or self.rows is None:
            return F.embedding(ids, weight, padding_idx, *args, **kwargs)
        padding = None if padding_idx is None else self.rows.position(int(padding_idx))
        result = F.embedding(self.rows.positions(ids), self.rows.tables[name], padding)
        if self.uses is not None:
            self.uses.note(F.embedding, [self.rows.tables[name]], result, is_lookup=True)
        return result

    def _row(self, weight: Tensor, row: int, index: Any) -> Tensor:
        """`weight[index]` for an index that begins with `row`."""
        if self.uses is not None:
            self.uses.constants.add((id(weight), row))
        name = self.names.get(id(weight))
        if name is None or self.rows is None or (position := self.rows.position(row)) is None:
            return weight[index]
        columns = index[1:] if isinstance(index, tuple) else ()
        return self.rows.tables[name][(position, *columns)]


class Capture:
    """Runs a model's forward without its layers.

    Attributes:
        model: the model; layer parameters on the meta device, buffers real.
        trunk: the outermost submodule that contains the stack and is called as a whole; the
            language-model head runs after it.
        task: of the model (`task_of`); without a head its output is the trunk's.
        takes_any: True if the forward passes unknown keyword arguments to its layers.
        encodes: True if the model has encoders of images or sounds.
        runner: the module whose forward calls the layers.
        layers: all layers of the stack, also those that no forward calls.
        of_transformers: True if no code but transformers' and PEFT's runs around the layers.
    """

    def __init__(
        self, model: "PreTrainedModel", stack: nn.ModuleList, layers: Iterable[nn.Module]
    ) -> None:
        from megatrain.compat import transformers as hf

        self.model = model
        self.trunk: nn.Module = model
        self._handler: Callable[[nn.Module, tuple, dict], Any] | None = None
        self._ends = False
        self.task = hf.task_of(model)
        self._signature = inspect.signature(model.forward).parameters
        kinds = [parameter.kind for parameter in self._signature.values()]
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        self.encodes = hf.encodes(model)
        # Its forward requires `mm_token_type_ids` in training, also for text.
        self._demands_types = type(model).__name__ == "Molmo2ForConditionalGeneration"
        self.layers = list(layers)
        self.runner = next(m for m in model.modules() if stack in m.children())
        for layer in self.layers:
            self._replace(layer)
        around = {type(m).forward for m in model.modules() if stack in m.modules()}
        packages = {f.__module__.partition(".")[0] for f in around - {nn.Module.forward}}
        self.of_transformers = packages <= {"transformers", "peft"}
        self._ties = ties(model)

    def _replace(self, layer: nn.Module) -> None:
        def recorder(*args: Any, **kwargs: Any) -> Any:
            assert self._handler is not None
            shared = containers(args, kwargs)  # first, as it lets pytree look into containers
            output, added, _ = self._handler(layer, args, kwargs)
            for container, entries in zip(shared, added, strict=True):
                container.update(entries)
            return output

        layer.forward = recorder

    def template(self, layer: nn.Module) -> nn.Module:
        """A copy of a layer, with its class's forward."""
        del layer.forward
        try:
            return copy.deepcopy(layer)
        finally:
            self._replace(layer)

    def restore(self) -> None:
        """Give the layers their classes' forwards again."""
        for layer in self.layers:
            del layer.forward

    @contextmanager
    def with_layers(self) -> Iterator["PreTrainedModel"]:
        """The model itself; within this context its layers run their own forwards."""
        self.restore()
        try:
            yield self.model
        finally:
            for layer in self.layers:
                self._replace(layer)

    def takes(self, name: str) -> bool:
        """True if the model's forward has an argument of this name."""
        return name in self._signature

    def accepts(self, name: str) -> bool:
        """True if the model's forward can use a micro-batch's tensor of this name."""
        common = self.takes_any and name in ("attention_mask", "position_ids")
        return (self.takes(name) or common) and name not in NO_IDS

    def is_media(self, name: str) -> bool:
        """True if a micro-batch's tensor of this name describes images or sounds."""
        return self.encodes and self.takes(name) and of_media(name)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments of the model's forward for a micro-batch."""
        kwargs: dict[str, Any] = dict(batch)
        if self._demands_types:
            kwargs.setdefault("mm_token_type_ids", torch.zeros_like(batch["input_ids"]))
        if "use_cache" in self._signature or self.takes_any:
            kwargs["use_cache"] = False
        if "return_dict" in self._signature:
            kwargs["return_dict"] = True
        if "output_router_logits" in self._signature:
            kwargs["output_router_logits"] = False  # routers' loss is computed separately
        unread_outputs = ("output_hidden_states", "output_attentions")  # no loss needs these
        switched_on = [name for name in unread_outputs if getattr(self.model.config, name, False)]
        return kwargs | {name: False for name in switched_on if self.takes(name) or self.takes_any}

    def forward(
        self,
        handler: Callable[[nn.Module, tuple, dict], Any],
        weights: Mapping[str, Tensor],
        inputs: Mapping[str, Any],
        rows: Rows | None = None,
        uses: Uses | None = None,
    ) -> Any:
        """Run the model with `handler(layer, args, kwargs)` in place of each layer.

        A handler returns the layer's output, and the values to put into each of its containers.

        Returns the value of a raised `Reached`, else the model's own output.
        """
        names = {id(weights[name]): name for name in rows.tables} if rows is not None else {}
        try:
            # torch.compile would trace the lookups' mode.
            with changed([self], _handler=handler), not_compiled(), Lookups(names, rows, uses):
                return self._call(weights, inputs)
        except Reached as reached:
            return reached.args[0]

    def head(self, weights: Mapping[str, Tensor], output: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Logits `[B, T, V]` from a trunk output, by the model's own code after the trunk.

        For a model that scores rows, scores of each token, as if each were the last of a row.
        """
        if self.task != "SEQ_CLS":
            result = self._after_trunk(weights, output, inputs)
            return result.logits if hasattr(result, "logits") else result[0]
        hidden_BTD = last_hidden(output)
        rows = hidden_BTD.reshape(-1, 1, hidden_BTD.shape[-1])
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        inputs = self.inputs({"input_ids": ids})
        result = self._after_trunk(weights, with_hidden(output, rows), inputs)
        return result.logits.unflatten(0, hidden_BTD.shape[:-1])

    def own_loss(
        self,
        weights: Mapping[str, Tensor],
        output: Any,
        inputs: Mapping[str, Any],
        labels: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss of labels `[B, T]` and the logits by the model's own forward; see `head`.

        Either is None if the forward does not return it.
        """
        if "labels" not in self._signature and not self.takes_any:
            return None, None
        result = self._after_trunk(weights, output, {**inputs, "labels": labels})
        if hasattr(result, "logits"):
            return getattr(result, "loss", None), result.logits
        has_loss = isinstance(result, tuple) and len(result) > 1 and result[0].dim() == 0
        return (result[0], result[1]) if has_loss else (None, None)

    def _after_trunk(self, weights: Mapping[str, Tensor], output: Any, inputs: Mapping) -> Any:
        self.trunk.forward = lambda *args, **kwargs: output
        try:
            return self._call(weights, inputs)
        finally:
            del self.trunk.forward

    def _call(self, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Any:
        """The model's own forward. Tied weights are passed under all their names.

        torch would search for ties in each call: a millisecond for 24 layers.
        """
        tied = {alias: weights[name] for name, alias in self._ties if name in weights}
        bound = {**weights, **tied}
        versions = versions_of(inputs)
        try:
            return functional_call(self.model, bound, (), dict(inputs), tie_weights=False)
        finally:
            if written := dict(versions.items() - versions_of(inputs).items()):
                raise Unsupported(
                    f"its forward changes {min(written)} of a batch in place; copy it"
                )

    @contextmanager
    def stop_after_trunk(self) -> Iterator[None]:
        """Within this context a run ends with the trunk's output."""

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self._ends:  # Ctrl-C may break off the hook's removal
                raise Reached(output)

        with self.trunk.register_forward_hook(end), changed([self], _ends=True):
            yield


def ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of a tied parameter: its first name, and that of each other attribute.

    A module that is in the model under two names counts once. If its attribute were in two pairs,
    `functional_call` would leave the call's weight there for good.
    """
    first_name = {id(p): name for name, p in model.named_parameters()}
    attributes = [
        (id(p), f"{path}.{name}".lstrip("."))
        for path, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    pairs = [(first_name.get(key, name), name) for key, name in attributes]
    return [(first, name) for first, name in pairs if first != name]


def last_hidden(output: Any) -> Tensor:
    """The hidden states `[B, T, D]` in a trunk's output."""
    return output if isinstance(output, Tensor) else output[0]


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """A trunk output like `output` whose hidden states are `hidden`."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    copied = type(output)(**dict(output))
    copied[next(iter(output.keys()))] = hidden
    return copied
