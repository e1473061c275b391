"""What the engine has to know of a model, read off one run of its own forward.

The run is made on the CPU with all weights zero (pages of zeros that take no memory) and a handful
of tokens: only structure is learned from it, so it needs no weights and costs no time.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from megatrain.errors import InputError
from megatrain.model.kind import Kind, signature, template, without_index
from megatrain.model.skeleton import (
    PROLOGUE,
    Call,
    Reached,
    Ref,
    Rows,
    Skeleton,
    Uses,
    last_hidden,
    with_hidden,
)

PROBE_SHAPE = (2, 8)  # rows, tokens of the structure run


class Unsupported(InputError):
    """A model that cannot be streamed; the message says why."""


@dataclass
class Layer:
    """One visit of the stack.

    Attributes:
        name: Hugging Face path of the layer module.
        inputs: activations that it reads, in argument order.
        glue: argument leaves computed by the model's own forward from earlier activations;
            they are computed again with real values (`Program.arguments`).
    """

    name: str
    module: nn.Module
    kind: Kind
    inputs: list[Ref]
    glue: frozenset[int]


@dataclass
class Outline:
    """The model as the engine sees it.

    Attributes:
        layers: in visiting order.
        outputs: per layer, the activations that anything later reads.
        epilogue_inputs: activations that the epilogue reads.
        gathered: embedding tables looked up only by the batch's own token ids; their rows are
            gathered on the host.
        prologue, epilogue: names of the other parameters used before and after the layers.
        fixed: those of them that no gradient reaches (plain training leaves them alone, too).
        unused: parameters that text training never touches; they stay as they are.
    """

    skeleton: Skeleton
    layers: list[Layer]
    epilogue_inputs: list[Ref]
    gathered: list[str]
    prologue: list[str]
    epilogue: list[str]
    fixed: list[str]
    unused: list[str]
    outputs: list[list[Ref]] = field(default_factory=list)

    def __post_init__(self) -> None:
        read = {ref for layer in self.layers for ref in layer.inputs} | set(self.epilogue_inputs)
        self.outputs = [
            sorted(ref for ref in read if ref.visit == visit) for visit in range(len(self.layers))
        ]
        self.prologue_outputs = sorted(ref for ref in read if ref.visit == PROLOGUE)


def find_stacks(model: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    """Every outermost ModuleList, the one with most parameters first."""
    stacks: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(other + ".") for other, _ in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            stacks.append((name, module))
    return sorted(stacks, key=lambda s: -sum(p.numel() for p in s[1].parameters()))


def outline(model: PreTrainedModel) -> Outline:
    """Learn the structure of `model` (meta parameters, real CPU buffers).

    Raises:
        Unsupported: the model has no stack of layers, or one that cannot be streamed.
    """
    reasons = []
    for name, stack in find_stacks(model):
        try:
            return _Probe(model, name, stack).run()
        except NotCalled:
            reasons.append(name)
            for layer in stack:
                layer.__dict__.pop("forward", None)
    raise Unsupported(
        f"{type(model).__name__} has no list of layers that its text forward calls one after the "
        f"other (looked at: {', '.join(reasons) or 'none'})"
    )


class NotCalled(Exception):
    """The probe ran the model and none of the stack's layers was called."""


class _Tag(torch.autograd.Function):
    """Marks an activation in the autograd graph with its origin."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ref: Ref) -> Tensor:  # type: ignore[override]
        ctx.ref = ref
        return value.detach().clone().requires_grad_()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return gradient[0], None


@dataclass
class _Reach:
    """What a tensor depends on: activations, parameters (by id) and the operations between."""

    refs: set[Ref] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)


def reach(tensors: list[Tensor]) -> _Reach:
    """Walk the autograd graph of `tensors` back to tagged activations and leaves."""
    found, queue, seen = _Reach(), [t.grad_fn for t in tensors if t.grad_fn is not None], set()
    found.leaves.update(id(t) for t in tensors if t.requires_grad and t.grad_fn is None)
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "ref"):
            found.refs.add(node.ref)
        elif hasattr(node, "variable"):
            found.leaves.add(id(node.variable))
        else:
            found.operations.add(node.name())
            queue.extend(parent for parent, _ in node.next_functions)
    return found


class _Probe:
    """One structure run over a model."""

    def __init__(self, model: PreTrainedModel, stack_name: str, stack: nn.ModuleList) -> None:
        self.model, self.stack_name = model, stack_name
        self.paths = {id(layer): f"{stack_name}.{i}" for i, layer in enumerate(stack)}
        inside = {id(p) for p in stack.parameters()}
        self.outer = {n: p for n, p in model.named_parameters() if id(p) not in inside}
        self._refuse_shared(stack)
        self.skeleton = Skeleton(model, stack)
        self.kinds: dict[tuple, Kind] = {}
        self.calls: list[Call] = []
        self.layers: list[Layer] = []
        self.origin: dict[int, Ref] = {}  # id of an activation -> where it came from
        self.alive: list[Tensor] = []  # keeps those ids valid
        self.anchor = torch.zeros((), requires_grad=True)

    def _refuse_shared(self, stack: nn.ModuleList) -> None:
        seen: dict[int, str] = {id(p): name for name, p in self.outer.items()}
        for index, layer in enumerate(stack):
            for name, parameter in layer.named_parameters():
                path = f"{self.stack_name}.{index}.{name}"
                if id(parameter) in seen:
                    raise Unsupported(f"{path} is the same parameter as {seen[id(parameter)]}")
            seen |= {
                id(p): f"{self.stack_name}.{index}.{n}" for n, p in layer.named_parameters()
            }

    def run(self) -> Outline:
        self._find_trunk()
        weights = {
            name: torch.zeros(p.shape, requires_grad=True) for name, p in self.outer.items()
        }
        ids = torch.arange(PROBE_SHAPE[0] * PROBE_SHAPE[1]).remainder(4).view(PROBE_SHAPE)
        inputs = self.skeleton.inputs({"input_ids": ids})
        uses = Uses()
        with torch.enable_grad():
            gathered = self._tables(weights, ids, inputs)
            rows = _probe_rows(ids, weights, gathered)
            with self.skeleton.stop_at_trunk():
                output = self.skeleton.forward(self._record, weights, inputs, rows, uses)
            return self._finish(weights, rows, gathered, output, inputs, uses)

    def _find_trunk(self) -> None:
        path = self.stack_name.split(".")
        ancestors = {
            id(self.model.get_submodule(".".join(path[:n]))): ".".join(path[:n])
            for n in range(1, len(path))
        }
        called: list[nn.Module] = []

        def stop(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
            raise Reached(True)

        hooks = [
            self.model.get_submodule(name).register_forward_pre_hook(
                lambda module, args: called.append(module)
            )
            for name in ancestors.values()
        ]
        try:
            weights = {name: torch.zeros(p.shape) for name, p in self.outer.items()}
            ids = torch.zeros(PROBE_SHAPE, dtype=torch.long)
            with torch.no_grad():
                reached = self.skeleton.forward(
                    stop, weights, self.skeleton.inputs({"input_ids": ids})
                )
        finally:
            for hook in hooks:
                hook.remove()
        if reached is not True:
            raise NotCalled
        if not called:
            raise Unsupported(
                f"{type(self.model).__name__} calls the layers of {self.stack_name} itself, with "
                "no module between them and the language-model head"
            )
        self.skeleton.trunk = called[0]

    def _tables(
        self, weights: dict[str, Tensor], ids: Tensor, inputs: Mapping[str, Any]
    ) -> list[str]:
        """Embedding tables that the prologue looks up by the batch's ids and uses no other way."""
        uses = Uses()
        arguments: list[Any] = []

        def first(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
            arguments.extend(pytree.tree_leaves((args, kwargs)))
            raise Reached(None)

        self.skeleton.forward(first, weights, inputs, None, uses)
        names = {id(w): name for name, w in weights.items()}
        mine = {
            names[id(w)]
            for w, used in uses.lookups
            if id(w) in names and used.data_ptr() == ids.data_ptr() and used.numel() == ids.numel()
        }
        others = {
            names[id(w)]
            for w, used in uses.lookups
            if id(w) in names and used.data_ptr() != ids.data_ptr()
        }
        rows = _probe_rows(ids, weights, sorted(mine - others))
        arguments.clear()
        self.skeleton.forward(first, weights, inputs, rows)
        dense = reach([a for a in arguments if isinstance(a, Tensor)]).leaves
        return sorted(name for name in mine - others if id(weights[name]) not in dense)

    def _record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        visit = len(self.layers)
        path = self.paths[id(module)]
        if any(layer.name == path for layer in self.layers):
            raise Unsupported(f"{path} is called more than once in a forward")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = Call([self._trace(leaf, path) for leaf in leaves], spec)
        glue = frozenset(i for i, leaf in enumerate(call.leaves) if isinstance(leaf, _Glue))
        inputs: list[Ref] = []
        for leaf in call.leaves:
            refs = leaf.refs if isinstance(leaf, _Glue) else [leaf]
            inputs += [r for r in refs if isinstance(r, Ref) and r not in inputs]
        kind, outputs = self._call(module, args, kwargs)
        self.calls.append(call)
        self.layers.append(Layer(path, module, kind, inputs, glue))
        return self._tagged(visit, kind, outputs)

    def _trace(self, leaf: Any, path: str) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.origin:
            return self.origin[id(leaf)]
        if not leaf.requires_grad:
            return leaf
        found = reach([leaf])
        if found.refs:
            return _Glue(sorted(found.refs), found)
        ref = Ref(PROLOGUE, sum(r.visit == PROLOGUE for r in self.origin.values()))
        self.origin[id(leaf)] = ref
        self.alive.append(leaf)
        return ref

    def _call(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Kind, list[Any]]:
        key = (signature(module, with_index=False),)
        known = self.kinds.get(key)
        if known is not None:
            return known, known.example
        kind = Kind(without_index(template(module)))
        try:
            outputs = _zeros(kind, module, args, kwargs)
        except AttributeError:
            # This forward reads its number: each such layer is a kind of its own.
            kind = Kind(template(module))
            outputs = _zeros(kind, module, args, kwargs)
        else:
            self.kinds[key] = kind
        kind.example = outputs
        return kind, outputs

    def _tagged(self, visit: int, kind: Kind, outputs: list[Any]) -> Any:
        leaves = []
        for index, value in enumerate(outputs):
            if isinstance(value, Tensor):
                ref = Ref(visit, index)
                if value.is_floating_point():
                    with torch.enable_grad():
                        value = _Tag.apply(value + self.anchor, ref)
                else:
                    value = value.clone()
                self.origin[id(value)] = ref
                self.alive.append(value)
            leaves.append(value)
        return pytree.tree_unflatten(leaves, kind.output_spec)

    def _finish(
        self,
        weights: dict[str, Tensor],
        rows: Rows,
        gathered: list[str],
        output: Any,
        inputs: Mapping[str, Any],
        uses: Uses,
    ) -> Outline:
        names = {id(w): name for name, w in weights.items()}
        table_names = {id(t): name for name, t in rows.tables.items()}
        hidden = last_hidden(output)
        end = reach([hidden])
        if not end.refs:
            raise Unsupported(f"the output of {self.stack_name} does not depend on its layers")
        logits = self._logits(weights, output, inputs)
        after = end.leaves | reach([logits]).leaves
        before: set[int] = set()
        for leaf in self.alive:
            if self.origin[id(leaf)].visit == PROLOGUE:
                before |= reach([leaf]).leaves
        self._refuse_glue_parameters(before | after, names)
        epilogue = sorted(names[i] for i in after if i in names)
        if after & set(table_names):
            raise Unsupported("the epilogue reads the token embeddings of the prologue")
        prologue = sorted(names[i] for i in before if i in names and names[i] not in epilogue)
        known = {*gathered, *prologue, *epilogue}
        fixed = sorted(n for n, w in weights.items() if id(w) in uses.touched and n not in known)
        both = [names[i] for i in before if i in names and names[i] in epilogue]
        if both:
            raise Unsupported(f"{both[0]} is used both before and after the layers")
        known.update(fixed)
        return Outline(
            self.skeleton,
            self.layers,
            sorted(end.refs),
            gathered,
            prologue + fixed,
            epilogue,
            fixed,
            [name for name in weights if name not in known] + self._skipped_layers(),
        )

    def _logits(self, weights: dict[str, Tensor], output: Any, inputs: Mapping) -> Tensor:
        hidden = last_hidden(output).detach()[:1, :2].clone().requires_grad_()
        logits = self.skeleton.head(weights, with_hidden(output, hidden), inputs)
        if not isinstance(logits, Tensor) or logits.shape[:2] != hidden.shape[:2]:
            raise Unsupported("its head does not give one row of logits per token")
        return logits

    def _refuse_glue_parameters(self, known: set[int], names: dict[int, str]) -> None:
        for layer, call in zip(self.layers, self.calls, strict=True):
            for leaf in call.leaves:
                if isinstance(leaf, _Glue) and leaf.reach.leaves:
                    inner = sorted(names.get(i, "an embedding") for i in leaf.reach.leaves)
                    raise Unsupported(
                        f"between its layers, before {layer.name}, its forward uses {inner[0]}"
                    )

    def _skipped_layers(self) -> list[str]:
        called = {layer.name for layer in self.layers}
        return [
            f"{path}.{name}"
            for layer, path in ((m, self.paths[id(m)]) for m in self._stack())
            if path not in called
            for name, _ in layer.named_parameters()
        ]

    def _stack(self) -> nn.ModuleList:
        stack = self.model.get_submodule(self.stack_name)
        assert isinstance(stack, nn.ModuleList)
        return stack


@dataclass
class _Glue:
    """An argument computed by the model's own forward from earlier activations."""

    refs: list[Ref]
    reach: _Reach


def _zeros(kind: Kind, module: nn.Module, args: tuple, kwargs: dict) -> list[Any]:
    weights = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
    weights.update(dict(module.named_buffers()))
    containers = [v for v in (*args, *kwargs.values()) if isinstance(v, MutableMapping)]
    sizes = [len(container) for container in containers]
    with torch.no_grad():
        outputs = kind.call(weights, args, kwargs)
    if sizes != [len(container) for container in containers]:
        raise Unsupported(f"{type(module).__name__} hands state to later layers through an argument")
    return outputs


def _probe_rows(ids: Tensor, weights: Mapping[str, Tensor], names: list[str]) -> Rows:
    unique, index = torch.unique(ids, return_inverse=True)
    tables = {
        name: torch.zeros(len(unique), weights[name].shape[1], requires_grad=True)
        for name in names
    }
    return Rows(ids, index, tables, unique)
