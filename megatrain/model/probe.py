"""Reads a model's spec off one run of its own forward.

The run is made on the CPU with all weights zero (pages of zeros that take no memory) and a handful
of tokens: only structure is learned from it, so it needs no weights and costs no time. What the
forward computes from what is read off the autograd graph.
"""

import re
from collections.abc import Hashable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Cache, PreTrainedModel

from megatrain.compat import peft
from megatrain.compat.torch import has_gradient_hooks, not_compiled, pytree
from megatrain.compat.transformers import takes_grouped_products, without_atomic_sums
from megatrain.errors import Unsupported, explained
from megatrain.model import unsupported
from megatrain.model.adapters import adapted, refuse_idle
from megatrain.model.capture import (
    PROLOGUE,
    Capture,
    Lookups,
    Reached,
    Ref,
    Rows,
    Uses,
    identity,
    last_hidden,
    ties,
    with_hidden,
)
from megatrain.model.fingerprint import INDEX_ATTRIBUTES, Reader
from megatrain.model.head_checks import label_shift, refuse_mixing
from megatrain.model.layer_template import LayerTemplate, NumberRead, without_index
from megatrain.model.routers import RouterLoss, router_loss, tap
from megatrain.model.spec import PROBE_IDS, PROBE_SHAPE, Layer, ModelSpec
from megatrain.model.zeros import ZeroProducts, zero_pages

_MORE_STATES = "its head computes logits from more than the last hidden states"


def spec(model: PreTrainedModel, *, trained: bool = True) -> ModelSpec:
    """Learn the structure of `model` (meta parameters, real CPU buffers), to be trained or not.

    Raises Unsupported: the model has no stack of layers, or one that cannot be streamed, or its
    configuration makes a model that cannot be run at all.
    """
    unsupported.refuse_settings(model.config)
    unsupported.refuse_behaviour(model)
    try:
        called = set[int]()
        note = register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
        with note, not_compiled():
            structure = _spec(model, router_loss(model) if trained else None)
        if trained and adapted(model) is not None:
            refuse_idle(model, structure.layers, called)
        structure.label_shift = label_shift(structure)
        structure.stacks = [
            f"{layer.name}.{path}.{name}"
            for layer in structure.layers
            for path, module in layer.module.named_modules()
            if takes_grouped_products(module, [])
            for name, _ in module.named_parameters(recurse=False)
        ]
        return structure
    except Unsupported:
        raise
    except Exception:
        _refuse_broken(model)
        raise  # it works where it is run as a whole: not the user's mistake


def _refuse_broken(model: PreTrainedModel) -> None:
    weights = {name: zero_pages(p.shape) for name, p in model.named_parameters()}
    problem, remedy = f"{type(model).__name__} cannot be run on text", "check its configuration"
    if type(model).forward is nn.Module.forward:
        parts = [name for name, m in model.named_children() if type(m).forward != nn.Module.forward]
        raise Unsupported(
            f"{type(model).__name__} has no forward of its own; train one of its parts "
            f"({', '.join(parts)}), saved as a model"
        )
    wrapped = {n: peft.inner(m) for n, m in peft.wrappers(model)} if adapted(model) else {}
    linear = {n: type(m) for n, m in wrapped.items() if isinstance(m, nn.Linear)}
    wider = {n.rpartition(".")[2] for n, cls in linear.items() if cls.forward != nn.Linear.forward}
    if wider:
        names = ", ".join(sorted(wider))
        remedy = f"adapters stand for plain linear layers: name others ({names}) in exclude_modules"
    with (
        explained(problem, remedy, into=Unsupported),
        torch.no_grad(),
        ZeroProducts(weights.values()),
    ):
        functional_call(model, weights, (torch.zeros(PROBE_SHAPE, dtype=torch.long),))


def _spec(model: PreTrainedModel, routers: RouterLoss | None) -> ModelSpec:
    not_called = []
    for name, stack in find_stacks(model):
        probe = _Probe(model, (name, stack), routers)
        try:
            return probe.run()
        except BaseException as error:
            probe.capture.restore()
            if not isinstance(error, NotCalled):
                raise
            not_called.append(name)
    raise Unsupported(
        f"{type(model).__name__} has no list of layers that its text forward calls one after the "
        f"other (looked at: {', '.join(not_called) or 'none'})"
    )


def find_stacks(model: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    """Every outermost ModuleList, the one with most parameters first."""
    stacks: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(outer + ".") for outer, _ in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not is_nested:
            stacks.append((name, module))
    return sorted(stacks, key=lambda s: -sum(p.numel() for p in s[1].parameters()))


class NotCalled(Exception):
    """The probe ran the model and none of the stack's layers was called."""


class _Probe:
    """One structure run over a model."""

    def __init__(
        self, model: PreTrainedModel, named: tuple[str, nn.ModuleList], routers: RouterLoss | None
    ) -> None:
        self.model, self.router_loss = model, routers
        self.stack_name, self.stack = stack_name, stack = named
        self.paths = {id(layer): f"{stack_name}.{i}" for i, layer in enumerate(stack)}
        in_stack = {id(p) for p in stack.parameters()}
        self.outer = {n: p for n, p in model.named_parameters() if id(p) not in in_stack}
        self._refuse_shared()
        self.numbered = set[int]()
        self.signatures = {id(layer): self._signature(layer) for layer in stack}
        self.capture = Capture(model, stack)
        self.kinds: dict[Any, LayerTemplate] = {}
        self.layers: list[Layer] = []
        self.without_gradients: list[str] = []  # layers that are called so
        self.origin: dict[Hashable, Ref] = {}  # identity of an activation -> where it came from
        self.alive: list[Tensor] = []  # keeps those identities valid
        self.uses = Uses()
        self.inputs = self.capture.inputs({"input_ids": PROBE_IDS})
        self.weights = {n: zero_pages(p.shape, requires_grad=True) for n, p in self.outer.items()}

    def _refuse_shared(self) -> None:
        if len(self.paths) < len(self.stack):
            raise Unsupported(f"a layer is in {self.stack_name} twice, which is not supported")
        number = re.compile(rf"{re.escape(self.stack_name)}\.(\d+)\.")
        for name, other in ties(self.model):
            layers = [found and found[1] for found in map(number.match, (name, other))]
            if layers[0] != layers[1]:
                raise Unsupported(
                    f"{other} is the same parameter as {name}; weights that layers share are not "
                    "supported"
                )

    def _signature(self, layer: nn.Module) -> Any:
        reader = Reader(layer, left_out=INDEX_ATTRIBUTES)
        signature = reader.of(layer)
        for weight in reader.strays:
            names = {id(p): name for name, p in self.model.named_parameters()}
            text = names.get(id(weight), f"a weight {list(weight.shape)}")
            raise Unsupported(
                f"{self.paths[id(layer)]} holds {text}, but not as one of its parameters (in a "
                "list, a function, another module's method); such weights are not supported"
            )
        if reader.reads_dictionaries:  # where a layer's number may be, which cannot be hidden there
            self.numbered.add(id(layer))
        return signature

    def run(self) -> ModelSpec:
        randomness = unsupported.OtherRandomness()
        self._find_trunk()
        watch = unsupported.Watch(self.model, "", [*self.stack])
        with torch.enable_grad(), randomness:
            gathered, constants = self._tables()
            rows = self._rows(gathered, constants)
            with self.capture.stop_after_trunk():
                output = self._forward(self._record, rows, self.uses)
            if any(map(has_gradient_hooks, self.alive)):
                raise Unsupported(
                    "its forward registers a hook of an activation's gradient between layers, "
                    "which would not be run; move the hook into a layer"
                )
            structure = self._finish(rows, constants, output)
        refuse_mixing(structure)
        unsupported.refuse_state(watch, lambda: self._again(output, rows))
        if self.without_gradients:  # other reasons first, which say more
            raise Unsupported(
                f"{self.without_gradients[0]} is called under torch.no_grad(), and would be "
                "trained here; freeze its parameters by requires_grad_(False) and call it without"
            )
        if not unsupported.layer_drops(self.model.config):
            randomness.refuse()
        return structure

    def _forward(self, handler: Any, rows: Rows | None = None, uses: Uses | None = None) -> Any:
        return self.capture.forward(handler, self.weights, self.inputs, rows, uses)

    def _rows(self, names: list[str], constants: Iterable[int]) -> Rows:
        ids = torch.tensor(sorted(constants), dtype=PROBE_IDS.dtype)
        unique = torch.unique(torch.cat([PROBE_IDS.flatten(), ids]))
        widths = {name: self.weights[name].shape[1] for name in names}
        tables = {n: torch.zeros(len(unique), w, requires_grad=True) for n, w in widths.items()}
        return Rows(PROBE_IDS, torch.searchsorted(unique, PROBE_IDS), tables, unique)

    def _again(self, output: Any, rows: Rows) -> list[Any]:
        """The layers' arguments in another run, and the results computed from their outputs."""
        results: list[Any] = []
        visits = iter(self.layers)

        def replay(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            results.extend(pytree.tree_leaves((args, kwargs)))
            kind = next(visits).kind
            return pytree.tree_unflatten(list(kind.example), kind.output_spec)

        with torch.no_grad(), self.capture.stop_after_trunk():
            results.append(last_hidden(self._forward(replay, rows)))
        return [*results, self._logits(output)]

    def _find_trunk(self) -> None:
        """Find the module around the layers, in the runs that settle the model."""
        path = self.stack_name.split(".")
        called: list[nn.Module] = []
        with ExitStack() as hooks:
            for n in range(1, len(path)):
                ancestor = self.model.get_submodule(".".join(path[:n]))
                note = ancestor.register_forward_pre_hook(
                    lambda module, args: called.append(module)
                )
                hooks.enter_context(note)
            shapes = {name: p.shape for name, p in self.outer.items()}
            if not unsupported.settle(self.capture, self.stack, shapes):
                raise NotCalled
        if self.capture.embeds:  # some pool after their layers, which is no part of it
            called.insert(0, self.model)
        if not called:
            raise Unsupported(
                f"{type(self.model).__name__} calls the layers of {self.stack_name} itself, with "
                "no module between them and the language-model head"
            )
        self.capture.trunk = called[0]

    def _tables(self) -> tuple[list[str], list[int]]:
        """Tables from which the prologue takes rows and no more: of the batch's ids, or fixed."""
        uses, arguments = Uses(), list[Any]()

        def first(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
            arguments.extend(pytree.tree_leaves((args, kwargs)))
            raise Reached(None)

        self._forward(first, None, uses)
        names = {id(w): name for name, w in self.weights.items()}
        looked_up = [(names[id(w)], used) for w, used in uses.lookups if id(w) in names]
        of_ids = PROBE_IDS.flatten().sort().values  # a lookup may have the batch's ids in any order
        other_uses = {
            n for n, used in looked_up if not torch.equal(used.flatten().sort().values, of_ids)
        }
        other_uses |= {names[i] for i in uses.read.union(map(id, arguments)) if i in names}
        mine = sorted({name for name, _ in looked_up} - other_uses)
        constants = {row for table, row in uses.constants if row >= 0 and names.get(table) in mine}
        return mine, sorted(constants)

    def _record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Note a layer, its kind and its inputs; returns the kind's example as its outputs."""
        visit = len(self.layers)
        path = self.paths[id(module)]
        if any(layer.name == path for layer in self.layers):
            raise Unsupported(f"{path} is called more than once in a forward")
        if not torch.is_grad_enabled():
            self.without_gradients.append(path)
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Cache) for leaf in leaves):
            raise Unsupported(f"{path} is given a key-value cache in training")
        activations = [self._trace(leaf, path) for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [ref for ref in dict.fromkeys(activations) if ref is not None]
        kind = self._kind(module, path, *pytree.tree_unflatten(leaves, tree_spec))
        self.layers.append(Layer(path, module, kind, inputs))
        outputs = []
        for index, value in enumerate(kind.example):
            if isinstance(value, Tensor):
                ref = Ref(visit, index)
                value = tag(value, ref) if value.is_floating_point() else value.clone()
                self.origin[identity(value)] = ref
                self.uses.derived[id(value)] = value
                self.alive.append(value)
            outputs.append(value)
        return pytree.tree_unflatten(outputs, kind.output_spec)

    def _trace(self, leaf: Tensor, path: str) -> Ref | None:
        """The activation that an argument is; None if no gradient flows to it."""
        if identity(leaf) in self.origin:
            self._refuse_other_gradients(leaf, path)
            return self.origin[identity(leaf)]
        if id(leaf) in self.uses.derived or reach([leaf]).refs:
            raise Unsupported(
                f"before {path}, its forward computes on what earlier layers gave; operations "
                "between layers are not supported"
            )
        if leaf.requires_grad:
            firsts = sum(ref.visit == PROLOGUE for ref in self.origin.values())
            self.origin[identity(leaf)] = Ref(PROLOGUE, firsts)
            self.alive.append(leaf)
        return self.origin.get(identity(leaf))

    def _refuse_other_gradients(self, leaf: Tensor, path: str) -> None:
        """Refuse code between layers that changes gradients alone."""
        ends, node = {value.grad_fn for value in self.alive}, leaf.grad_fn
        while node is not None and node not in ends:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise Unsupported(
                    f"before {path}, its forward calls {node.name().removesuffix('Backward')}, a "
                    "torch.autograd.Function; operations between layers are not supported"
                )
            node = node.next_functions[0][0] if node.next_functions else None

    def _kind(self, module: nn.Module, path: str, args: tuple, kwargs: dict) -> LayerTemplate:
        key = self.signatures[id(module)]
        if id(module) not in self.numbered:
            if key in self.kinds:
                return self.kinds[key]
            kind, reads = self._template(module, path, numbered=False), NumberRead.count
            with suppress(Exception):  # a forward may fail in any way without the number
                unsupported.try_kind(kind, path, module, args, kwargs)
                if NumberRead.count == reads:
                    self.kinds[key] = kind
                    return kind
        # This forward reads its number, or fails in any case: the layer becomes a separate kind.
        kind = self._template(module, path)
        unsupported.try_kind(kind, path, module, args, kwargs)
        return kind

    def _template(self, module: nn.Module, path: str, *, numbered: bool = True) -> LayerTemplate:
        template, loss = self.capture.template(module), self.router_loss
        unsupported.refuse_grad_modes(template, path)
        without_atomic_sums(template)
        template = template if numbered else without_index(template)
        if loss is not None:
            tap(template, path, self.model, loss)
        return LayerTemplate(template)

    def _finish(self, rows: Rows, constants: list[int], output: Any) -> ModelSpec:
        """The spec, from the trunk's output and from one run of the head on it."""
        weights = self.weights
        names = {id(w): name for name, w in weights.items()}
        end = reach([last_hidden(output)])
        if not end.refs:
            raise Unsupported(
                f"what {self.stack_name} gives cannot be traced back to its layers (they run "
                "inside an autograd function of their own)"
            )
        logits = self._logits(output)
        in_head = reach([logits]).leaves
        later = end.leaves | in_head
        firsts = [leaf for leaf in self.alive if self.origin[identity(leaf)].visit == PROLOGUE]
        prior = reach(firsts).leaves
        read_whole = {id(weights[name]) for name in rows.tables} & (self.uses.read - later)
        if read_whole or later & {id(table) for table in rows.tables.values()}:
            raise Unsupported("what follows the layers reads the token embeddings again")
        shared = sorted(names[i] for i in prior & later if i in names)
        if shared:
            raise Unsupported(f"{shared[0]} is used both before and after the layers")
        gathered, prologue = sorted(rows.tables), sorted(names[i] for i in prior if i in names)
        epilogue = sorted(names[i] for i in later if i in names)
        placed = {*gathered, *prologue, *epilogue}
        others = [name for name in weights if name not in placed]
        used = self.uses.touched
        if self.capture.encodes:  # some ask an encoder's weights for their dtype, and no more
            used = self.uses.read | {id(table) for table, _ in self.uses.lookups}
            used |= {table for table, _ in self.uses.constants}
        fixed = sorted(name for name in others if id(weights[name]) in used)
        still = [name for name in others if name not in fixed]
        media = still if self.capture.encodes else []
        called = {layer.name for layer in self.layers}
        paths = [(self.paths[id(layer)], layer) for layer in self.stack]
        skipped = [
            f"{path}.{name}"
            for path, layer in paths
            if path not in called
            for name, _ in layer.named_parameters()
        ]
        return ModelSpec(
            capture=self.capture,
            layers=self.layers,
            epilogue_inputs=sorted(end.refs),
            gathered=gathered,
            constants=constants,
            prologue=prologue + fixed,
            epilogue=epilogue,
            head=[name for name in epilogue if id(weights[name]) in in_head],
            num_logits=logits.shape[-1],
            trunk=with_hidden(output, last_hidden(output).detach()[:0]),
            fixed=fixed,
            unused=[n for n in still if n not in media] + skipped,
            media=media,
            router_loss=self.router_loss,
        )

    def _logits(self, output: Any) -> Tensor:
        # Not the run's row count: a value pooled in the trunk has as many rows as the run.
        hidden = last_hidden(output).detach()[:1, :3].clone().requires_grad_()
        inputs = {**self.inputs, "input_ids": PROBE_IDS[:1, :3]}
        try:
            # One row of each weight is multiplied, and shows that the logits depend on it.
            with ZeroProducts(self.weights.values(), 1), Lookups({}, None, self.uses):
                logits = self.capture.head(self.weights, with_hidden(output, hidden), inputs)
        except RuntimeError as error:  # other states of the trunk have more rows and tokens
            raise Unsupported(_MORE_STATES) from error
        if not isinstance(logits, Tensor) or logits.shape[:2] != hidden.shape[:2]:
            raise Unsupported(_MORE_STATES)
        if logits.dim() != 3:
            raise Unsupported("its head does not give logits of each token; give a ...ForCausalLM")
        return logits


class _Tag(torch.autograd.Function):
    """Marks an activation in the autograd graph with its origin."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ref: Ref) -> Tensor:
        ctx.ref = ref
        return value.detach().clone().requires_grad_()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return gradient[0], None


def tag(value: Tensor, ref: Ref) -> Tensor:
    """A copy of `value`, marked so that `reach` finds it behind tensors computed from it."""
    anchor = torch.zeros((), dtype=value.dtype, requires_grad=True)
    with torch.enable_grad():
        return _Tag.apply(value + anchor, ref)


@dataclass
class AutogradDeps:
    """The tagged activations, and leaves (by id), that tensors depend on."""

    refs: set[Ref] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)


def reach(tensors: Iterable[Tensor]) -> AutogradDeps:
    """Walk the autograd graph of `tensors` back to tagged activations and leaves."""
    tensors = list(tensors)
    deps, visited = AutogradDeps(), set()
    queue: list[Any] = [t.grad_fn for t in tensors]
    deps.leaves.update(id(t) for t in tensors if t.requires_grad and t.grad_fn is None)
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "ref"):
            deps.refs.add(node.ref)
        elif hasattr(node, "variable"):
            deps.leaves.add(id(node.variable))
        else:
            queue.extend(parent for parent, _ in node.next_functions)
    return deps
