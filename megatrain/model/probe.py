"""Finds a model's `ModelSpec` in one run of its own forward.

The run is on the CPU, with weights of zeros that take no memory and a handful of tokens: it shows
only the structure, needs no weights and takes no time. The autograd graph shows which tensors and
parameters each result depends on.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Cache, PreTrainedModel

from megatrain.base.changed import changed
from megatrain.compat import peft
from megatrain.compat.torch import has_gradient_hooks, not_compiled, pytree
from megatrain.compat.transformers import takes_grouped_products, without_atomic_sums
from megatrain.errors import Unsupported, explained
from megatrain.model import unsupported
from megatrain.model.adapters import adapted, linears_with_own_forward, refuse_idle
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
from megatrain.model.routers import BIASES, RouterLoss, router_loss, tap
from megatrain.model.spec import PROBE_IDS, PROBE_SHAPE, Layer, ModelSpec
from megatrain.model.zeros import ZeroProducts, zero_pages

_MORE_STATES = "its head computes logits from more than the last hidden states"


def spec(model: PreTrainedModel, *, trained: bool = True) -> ModelSpec:
    """The structure of `model` (meta parameters, real CPU buffers), to be `trained` or only run.

    Raises Unsupported: the model has no stack of layers that can be streamed, or cannot be run.
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
            if takes_grouped_products(module)
            for name, _ in module.named_parameters(recurse=False)
        ]
        return structure
    except Unsupported:
        raise
    except Exception:
        _refuse_broken(model)
        raise  # a bug here, as the whole model can be run


def _refuse_broken(model: PreTrainedModel) -> None:
    """Raises Unsupported: the model cannot be run as a whole either."""
    weights = {name: zero_pages(p.shape) for name, p in model.named_parameters()}
    problem, remedy = f"{type(model).__name__} cannot be run on text", "check its configuration"
    if type(model).forward is nn.Module.forward:
        parts = [name for name, m in model.named_children() if type(m).forward != nn.Module.forward]
        raise Unsupported(
            f"{type(model).__name__} has no forward of its own; train one of its parts "
            f"({', '.join(parts)}), saved as a model"
        )
    wrapped = [(n, peft.inner(m)) for n, m in peft.wrappers(model)] if adapted(model) else []
    if own_forwards := linears_with_own_forward(wrapped):
        names = ", ".join(own_forwards)
        remedy = f"adapters stand for plain linear layers: name others ({names}) in exclude_modules"
    with (
        explained(problem, remedy, into=Unsupported),
        torch.no_grad(),
        ZeroProducts(weights.values()),
    ):
        functional_call(model, weights, (torch.zeros(PROBE_SHAPE, dtype=torch.long),))


def _spec(model: PreTrainedModel, routers: RouterLoss | None) -> ModelSpec:
    """The structure of a model by the largest of its stacks that the forward calls."""
    not_called = []
    for name in find_stacks(model):
        probe = _Probe(model, name, routers)
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


def find_stacks(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Every outermost ModuleList by its path, the one with most parameters first."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not is_nested:
            stacks[name] = module
    sizes = {name: sum(p.numel() for p in stack.parameters()) for name, stack in stacks.items()}
    return {name: stacks[name] for name in sorted(stacks, key=lambda name: -sizes[name])}


def _layers_of(stack: nn.ModuleList, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a list with their paths; of a list of lists, those of the inner lists."""
    for number, layer in enumerate(stack):
        if isinstance(layer, nn.ModuleList) and type(layer).forward is nn.Module.forward:
            yield from _layers_of(layer, f"{path}.{number}")
        else:
            yield f"{path}.{number}", layer


class NotCalled(Exception):
    """The model's forward has called none of a stack's layers."""


class _Probe:
    """The structure run of a model, with one of its stacks."""

    def __init__(self, model: PreTrainedModel, stack_name: str, routers: RouterLoss | None) -> None:
        stack: Any = model.get_submodule(stack_name)
        self.model = model
        self.router_loss = routers
        self.stack_name = stack_name
        paths, layers = zip(*_layers_of(stack, stack_name), strict=True)
        self.paths = dict(zip(map(id, layers), paths, strict=True))  # by a layer's id
        in_stack = {id(p) for p in stack.parameters()}
        self.outer = {n: p for n, p in model.named_parameters() if id(p) not in in_stack}
        if len(self.paths) < len(layers):
            raise Unsupported(f"a layer is in {stack_name} twice, which is not supported")
        self._refuse_shared()
        self.numbered = set[int]()  # ids of layers that keep their number, as code may read it
        for layer in layers:
            modes = [module.training for module in layer.modules()]
            if modes != [module.training for module in layer.train().modules()]:
                raise Unsupported(
                    f"{self.paths[id(layer)]} is in another mode after the model's train() than "
                    "its own"
                )
        self.signatures = {id(layer): self._signature(layer) for layer in layers}
        self.capture = Capture(model, stack, layers)
        self.kinds: dict[Any, LayerTemplate] = {}
        self.layers: list[Layer] = []
        self.choosing: list[str] = []  # biases of routers that get no gradient
        self.without_gradients: list[str] = []  # layers that are called under no_grad
        self.origin: dict[Hashable, Ref] = {}  # `identity` of an activation -> its origin
        self.marks: dict[int, tuple[Tensor, Ref]] = {}  # id of a leaf -> the leaf, its activation
        self.alive: list[Tensor] = []  # activations, so that no other tensor gets their identity
        self.uses = Uses()
        self.inputs = self.capture.inputs({"input_ids": PROBE_IDS.clone()})
        self.weights = {n: zero_pages(p.shape, requires_grad=True) for n, p in self.outer.items()}

    def _refuse_shared(self) -> None:
        """Raises Unsupported: two layers, or a layer and another module, share a parameter."""

        def layer_of(name: str) -> str | None:
            return next((p for p in self.paths.values() if name.startswith(f"{p}.")), None)

        for name, alias in ties(self.model):
            if layer_of(name) != layer_of(alias):
                raise Unsupported(
                    f"{alias} is the same parameter as {name}; weights that layers share are not "
                    "supported"
                )

    def _signature(self, layer: nn.Module) -> Any:
        """A key that is equal for layers that differ in weights alone (and maybe in numbers)."""
        reader = Reader(layer, left_out=INDEX_ATTRIBUTES)
        signature = reader.of(layer)
        if reader.strays:
            weight = reader.strays[0]
            names = {id(p): name for name, p in self.model.named_parameters()}
            name = names.get(id(weight), f"a weight {list(weight.shape)}")
            raise Unsupported(
                f"{self.paths[id(layer)]} holds {name}, but not as one of its parameters (in a "
                "list, a function, another module's method); such weights are not supported"
            )
        if reader.reads_dictionaries:  # code that reads `__dict__` may see the layer's number
            self.numbered.add(id(layer))
        return signature

    def run(self) -> ModelSpec:
        randomness = unsupported.OtherRandomness()
        self._find_trunk()
        watch = unsupported.Watch(self.model, "", self.capture.layers)
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
        unsupported.refuse_state(watch, lambda: self._repeated(output, rows))
        if self.without_gradients:  # last, as other reasons say more
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
        """Rows of zeros for the tables `names`: those of `PROBE_IDS` and of the constants."""
        fixed = torch.tensor(sorted(constants), dtype=PROBE_IDS.dtype)
        unique = torch.unique(torch.cat([PROBE_IDS.flatten(), fixed]))
        widths = {name: self.weights[name].shape[1] for name in names}
        tables = {n: torch.zeros(len(unique), w, requires_grad=True) for n, w in widths.items()}
        ids = self.inputs["input_ids"]
        return Rows(ids, torch.searchsorted(unique, ids), tables, unique)

    def _repeated(self, output: Any, rows: Rows, uses: Uses | None = None) -> list[Any]:
        """The layers' arguments, the last hidden states and the logits, in another run."""
        values: list[Any] = []
        layers = iter(self.layers)

        def replay(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            values.extend(pytree.tree_leaves((args, kwargs)))
            kind = next(layers).kind
            return pytree.tree_unflatten(list(kind.example), kind.output_spec)

        with torch.no_grad(), self.capture.stop_after_trunk():
            hidden = last_hidden(self._forward(replay, rows, uses))
        return [*values, hidden, self._logits(output, uses)]

    def _read_after(self, rows: Rows, output: Any, before: Iterable[Tensor]) -> bool:
        """True if what follows the layers uses the tensors `before`, even without gradients."""
        uses = Uses(derived={id(tensor): tensor for tensor in before})
        *_, hidden, logits = self._repeated(output, rows, uses)
        return not {id(hidden), id(logits)}.isdisjoint(uses.derived)

    def _find_trunk(self) -> None:
        """Set the capture's trunk; raises NotCalled or Unsupported: there is none."""
        path = self.stack_name.split(".")
        around = [self.model.get_submodule(".".join(path[:end])) for end in range(1, len(path))]
        if self.capture.task == "FEATURE_EXTRACTION":  # the model's output is the trunk's
            around.append(self.model)
        called: list[nn.Module] = []
        with register_module_forward_pre_hook(lambda module, _: called.append(module)):
            shapes = {name: p.shape for name, p in self.outer.items()}
            if not unsupported.settle(self.capture, shapes):
                raise NotCalled
        trunk = next((module for module in called if module in around), None)
        if trunk is None:
            raise Unsupported(
                f"{type(self.model).__name__} calls the layers of {self.stack_name} itself, with "
                "no module between them and the language-model head"
            )
        self.capture.trunk = trunk

    def _tables(self) -> tuple[list[str], list[int]]:
        """Names of tables of which only the batch's and fixed rows are read; fixed rows."""
        uses = Uses()
        arguments: list[Any] = []  # of the first layer

        def stop_at_first(layer: nn.Module, args: tuple, kwargs: dict) -> Any:
            arguments.extend(pytree.tree_leaves((args, kwargs)))
            raise Reached(None)

        self._forward(stop_at_first, None, uses)
        names = {id(w): name for name, w in self.weights.items()}
        lookups = [(names[id(w)], ids) for w, ids in uses.lookups if id(w) in names]
        batch_ids = PROBE_IDS.flatten().sort().values  # sorted, as a lookup may reorder them
        used_otherwise = {
            name for name, ids in lookups if not torch.equal(ids.flatten().sort().values, batch_ids)
        }
        used_otherwise |= {names[i] for i in uses.read.union(map(id, arguments)) if i in names}
        tables = sorted({name for name, _ in lookups} - used_otherwise)
        constants = {row for w, row in uses.constants if row >= 0 and names.get(w) in tables}
        return tables, sorted(constants)

    def _record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Note a called layer, its kind and its inputs; returns its kind's example as outputs."""
        visit = len(self.layers)
        path = self.paths[id(module)]
        if any(layer.name == path for layer in self.layers):
            raise Unsupported(f"{path} is called more than once in a forward")
        if not torch.is_grad_enabled():
            self.without_gradients.append(path)
        if torch.is_autocast_enabled("cpu") or self.uses.reads_values:
            problem = "its forward reads values of earlier layers, or begins autocast"
            raise Unsupported(f"before {path}, {problem}; move that into a layer")
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Cache) for leaf in leaves):
            raise Unsupported(f"{path} is given a key-value cache in training")
        activations = [self._trace(leaf, path) for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [ref for ref in dict.fromkeys(activations) if ref is not None]
        arguments = pytree.tree_unflatten(leaves, tree_spec)
        with changed([self.uses], reads_values=False):  # a layer itself may read values
            kind = self._kind(module, path, *arguments)
            self.layers.append(Layer(path, module, kind, inputs))
            self.choosing += self._choosing(self.layers[-1], *arguments)
        outputs = []
        for index, value in enumerate(kind.example):
            if isinstance(value, Tensor):
                ref = Ref(visit, index)
                value = self._marked(value, ref) if value.is_floating_point() else value.clone()
                self.origin[identity(value)] = ref
                self.uses.derived[id(value)] = value
                self.alive.append(value)
            outputs.append(value)
        return pytree.tree_unflatten(outputs, kind.output_spec)

    def _marked(self, value: Tensor, ref: Ref) -> Tensor:
        """A copy of an activation, with a leaf of its own in the graphs of tensors that need it."""
        mark = torch.zeros((), dtype=value.dtype, requires_grad=True)
        self.marks[id(mark)] = mark, ref
        with torch.enable_grad():
            return value + mark

    def _reached(self, tensor: Tensor) -> list[Ref]:
        """The layers' activations on which a tensor depends."""
        return sorted(self.marks[leaf][1] for leaf in reach([tensor]) if leaf in self.marks)

    def _trace(self, leaf: Tensor, path: str) -> Ref | None:
        """The origin of a layer's argument; None: no gradient flows to it."""
        if identity(leaf) in self.origin:
            self._refuse_other_gradients(leaf, path)
            return self.origin[identity(leaf)]
        if id(leaf) in self.uses.derived or self._reached(leaf):
            raise Unsupported(
                f"before {path}, its forward computes on what earlier layers gave; operations "
                "between layers are not supported"
            )
        if leaf.requires_grad:
            number = sum(ref.visit == PROLOGUE for ref in self.origin.values())
            self.origin[identity(leaf)] = Ref(PROLOGUE, number)
            self.alive.append(leaf)
        return self.origin.get(identity(leaf))

    def _refuse_other_gradients(self, leaf: Tensor, path: str) -> None:
        """Raises Unsupported: an autograd.Function between layers, whose backward would be lost."""
        ends = {value.grad_fn for value in self.alive}
        node = leaf.grad_fn
        while node is not None and node not in ends:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise Unsupported(
                    f"before {path}, its forward calls {node.name().removesuffix('Backward')}, a "
                    "torch.autograd.Function; operations between layers are not supported"
                )
            node = node.next_functions[0][0] if node.next_functions else None

    def _kind(self, module: nn.Module, path: str, args: tuple, kwargs: dict) -> LayerTemplate:
        """The template of a layer's kind, which is tried when it is new."""
        key = self.signatures[id(module)]
        if id(module) not in self.numbered:
            if key in self.kinds:
                return self.kinds[key]
            kind = self._template(module, path, numbered=False)
            reads_before = NumberRead.count
            with suppress(Exception):  # without the number a forward may fail in any way
                unsupported.try_kind(kind, path, module, args, kwargs)
                if NumberRead.count == reads_before:
                    self.kinds[key] = kind
                    return kind
        # This forward reads the layer's number, or fails in any case: it gets a kind of its own.
        kind = self._template(module, path)
        unsupported.try_kind(kind, path, module, args, kwargs)
        return kind

    def _choosing(self, layer: Layer, args: tuple, kwargs: dict) -> list[str]:
        """Names of biases of a layer's routers that only choose experts: no gradient reaches them.

        Elsewhere in a layer a missing gradient counts as zero, as that of an idle expert.
        """
        weights = dict(layer.module.named_parameters())
        names = [name for name in weights if name.rpartition(".")[2] in BIASES]
        if not names:
            return []
        zeros = {n: zero_pages(p.shape, requires_grad=True) for n, p in weights.items()}
        with torch.random.fork_rng(devices=[]), ZeroProducts(zeros.values()):
            outputs = layer.kind.call(zeros | dict(layer.module.named_buffers()), args, kwargs)
        reached = reach(x for x in outputs if isinstance(x, Tensor) and x.requires_grad)
        return [f"{layer.name}.{name}" for name in names if id(zeros[name]) not in reached]

    def _template(self, module: nn.Module, path: str, *, numbered: bool = True) -> LayerTemplate:
        """A new template of a layer. Args: `numbered`: False: to read its number is an error."""
        copied = self.capture.template(module)
        unsupported.refuse_grad_modes(copied, path)
        without_atomic_sums(copied)
        copied = copied if numbered else without_index(copied)
        if self.router_loss is not None:
            tap(copied, path, self.model, self.router_loss)
        return LayerTemplate(copied)

    def _finish(self, rows: Rows, constants: list[int], output: Any) -> ModelSpec:
        """The structure, from the trunk's output and a run of the head on it."""
        weights = self.weights
        names = {id(w): name for name, w in weights.items()}
        epilogue_inputs = self._reached(last_hidden(output))
        if not epilogue_inputs:
            raise Unsupported(
                f"what {self.stack_name} gives cannot be traced back to its layers (they run "
                "inside an autograd function of their own)"
            )
        logits = self._logits(output, self.uses)
        # Ids of leaves on which logits, all that follows the layers, and the layers' inputs depend.
        in_head = reach([logits])
        in_epilogue = reach([last_hidden(output)]) | in_head
        entering = [leaf for leaf in self.alive if self.origin[identity(leaf)].visit == PROLOGUE]
        in_prologue = reach(entering)
        read_whole = {id(weights[name]) for name in rows.tables} & (self.uses.read - in_epilogue)
        if read_whole or in_epilogue & {id(table) for table in rows.tables.values()}:
            raise Unsupported("what follows the layers reads the token embeddings again")
        shared = sorted(names[i] for i in in_prologue & in_epilogue if i in names)
        if shared:
            raise Unsupported(f"{shared[0]} is used both before and after the layers")
        gathered = sorted(rows.tables)
        prologue = sorted(names[i] for i in in_prologue if i in names)
        epilogue = sorted(names[i] for i in in_epilogue if i in names)
        without_gradient = weights.keys() - {*gathered, *prologue, *epilogue}
        used = self.uses.touched
        if self.capture.encodes:  # `touched` includes weights that are asked for their dtype
            tables = [table for table, _ in self.uses.lookups]
            used = self.uses.read.union(map(id, tables), (i for i, _ in self.uses.constants))
        fixed = sorted(name for name in without_gradient if id(weights[name]) in used)
        unreached = [n for n in gathered if id(rows.tables[n]) not in in_prologue]
        unreached = [n for n in unreached if n not in epilogue]
        lookups = [rows.tables[name] for name in gathered if name not in unreached]
        if self._read_after(rows, output, [*lookups, *(weights[name] for name in prologue)]):
            problem = "what follows the layers reads by .detach() what precedes them"
            raise Unsupported(f"{problem}; let layers pass it on")
        constant = [*fixed, *unreached]
        kept = constant if self._read_after(rows, output, [weights[n] for n in constant]) else []
        gathered = [name for name in gathered if name not in kept]
        # Images and sounds may use the weights that text does not use.
        not_used = [name for name in weights if name in without_gradient and name not in fixed]
        media, unused = (not_used, []) if self.capture.encodes else ([], not_used)
        called = {layer.module for layer in self.layers}
        for layer in self.capture.layers:
            if layer not in called:
                unused += [f"{self.paths[id(layer)]}.{n}" for n, _ in layer.named_parameters()]
        return ModelSpec(
            capture=self.capture,
            layers=self.layers,
            epilogue_inputs=epilogue_inputs,
            gathered=gathered,
            constants=constants,
            prologue=prologue + sorted({*fixed, *kept}),
            epilogue=epilogue,
            head=[name for name in epilogue if id(weights[name]) in in_head],
            num_logits=logits.shape[-1],
            trunk=with_hidden(output, last_hidden(output).detach()[:0]),
            fixed=fixed + unreached + self.choosing,
            kept=kept,
            unused=unused,
            media=media,
            router_loss=self.router_loss,
        )

    def _logits(self, output: Any, uses: Uses | None) -> Tensor:
        """The head's logits of a few hidden states. Raises Unsupported: it needs more states."""
        # Other numbers of rows and tokens than the run's show states that the trunk has pooled.
        hidden = last_hidden(output).detach()[:1, :3].clone().requires_grad_()
        inputs = {**self.inputs, "input_ids": PROBE_IDS[:1, :3]}
        try:
            # The first row of each weight is multiplied, so that logits depend on the weight.
            with ZeroProducts(self.weights.values(), 1), Lookups({}, None, uses):
                logits = self.capture.head(self.weights, with_hidden(output, hidden), inputs)
        except RuntimeError as error:  # sizes differ, as other states have more rows and tokens
            raise Unsupported(_MORE_STATES) from error
        if not isinstance(logits, Tensor) or logits.shape[:2] != hidden.shape[:2]:
            raise Unsupported(_MORE_STATES)
        if logits.dim() != 3:
            raise Unsupported("its head does not give logits of each token; give a ...ForCausalLM")
        return logits


def reach(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of the leaves in the autograd graph of `tensors`."""
    tensors = list(tensors)
    leaves = {id(t) for t in tensors if t.requires_grad and t.grad_fn is None}
    visited = set()
    queue: list[Any] = [t.grad_fn for t in tensors]
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        else:
            queue.extend(parent for parent, _ in node.next_functions)
    return leaves
