"""The computations of a model: prologue, layers, epilogue and head, each called with its weights.

There are no streams, slots or copies here: tensors in, tensors out, one micro-batch at a time.
Legend: B rows, T tokens of a row, D width, V vocabulary.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.base.changed import changed
from megatrain.compat.torch import pytree, without_torch_function
from megatrain.compat.transformers import finding_once, set_owners
from megatrain.errors import InputError, RunFailed, explained
from megatrain.model import attention
from megatrain.model.adapters import adapted
from megatrain.model.build import loaded_types
from megatrain.model.capture import (
    ADDED,
    PROLOGUE,
    Call,
    Reached,
    Ref,
    Sum,
    Uses,
    identity,
    last_hidden,
    stop_at_layers,
)
from megatrain.model.float8 import convert, frozen_operands, require_float8, use_frozen_linear
from megatrain.model.layer_template import move_buffers
from megatrain.model.media import FrozenParts, Recorder, calls_of, in_one_row, replaced, replayed
from megatrain.model.micro_batch import Activations, MicroBatch, Weights
from megatrain.model.owned_experts import ExpertOwners
from megatrain.model.probe import reach
from megatrain.model.spec import PROBE_SHAPE, Layer, ModelSpec
from megatrain.model.token_chunks import ChunkedOverTokens, parts
from megatrain.model.unsupported import refuse_rounding
from megatrain.placement import Saves


class ModelProgram:
    """A model's computations on one device in one compute dtype, one micro-batch at a time."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, float8: bool = False
    ) -> None:
        """Args: `float8`: layers' linear modules compute in float8. InputError: no module can."""
        self.spec, self.device, self.dtype = spec, device, dtype
        self.capture = spec.capture
        model = self.capture.model
        fp32_biases = dict.fromkeys(spec.router_biases, torch.float32)
        self._types = types = {**loaded_types(model, dtype), **fp32_biases}
        refuse_rounding(types, spec.gathered, dtype)
        move_buffers(model, device, types)
        self.kinds = list({id(layer.kind): layer.kind for layer in spec.layers}.values())
        for kind in self.kinds:
            move_buffers(kind.module, device)
        self.scaled_together = self._in_float8() if float8 else list[nn.Module]()  # one scale each
        self.buffers = [_own_buffers(layer, types, spec.router_biases) for layer in spec.layers]
        fp32_on_gpu = device.type != "cpu" and dtype == torch.float32
        takes_lengths = attention.takes_lengths(model, fp32=fp32_on_gpu)
        self.may_attend_by_lengths = self.capture.takes_any and takes_lengths
        self.attends_by_lengths = self.exchanges_tokens = False  # until `attend` and `set_owners`
        self._kept_weights = dict[str, Tensor]()  # of the prologue, which the epilogue uses as well
        self._supported_media = set[frozenset[str]]()  # kinds of media for which a check passed
        # By shape of ids: numbers of calls of `_document_indices` that return None for ids alone.
        self._one_document_calls: dict[torch.Size, set[int]] = {}
        self._encoder_calls = calls_of(model, spec.media)
        if self._encoder_calls:
            attention.attend_by_images(model)
        name_parts = {part for name in spec.epilogue for part in name.split(".")}
        self._epilogue_has_layers = any(part.isdigit() for part in name_parts)
        self._outer = {  # zeros without memory, for weights that a run does not use
            name: torch.zeros((), device=device, dtype=self.type_of(name)).expand(p.shape)
            for name, p in model.named_parameters()
            if name in {*spec.prologue, *spec.epilogue, *spec.gathered, *spec.media}
        }

    def type_of(self, name: str) -> torch.dtype:
        """The dtype of a parameter in the forward."""
        return self._types.get(name, self.dtype)

    def _in_float8(self) -> list[nn.Module]:
        """Let linear modules compute in float8; returns those with one scale for all tokens."""
        require_float8(self.device)
        modules: list[nn.Module] = []
        frozen = frozen_operands(self.spec)
        for kind in self.kinds:
            layer = next(layer for layer in self.spec.layers if layer.kind is kind)
            names = {n: f"{layer.name}.{n}" for n, _ in kind.module.named_parameters()}
            if adapted(self.spec.capture.model) is None:
                fp32_names = {n for n, full in names.items() if self.type_of(full) != self.dtype}
                modules += convert(kind.module, self.device, fp32_names)
            use_frozen_linear(kind.module, (n for n, full in names.items() if full in frozen))
        if not modules and not frozen:
            raise InputError(
                "precision is 'fp8', but no nn.Linear's sizes are multiples of 16; take bf16"
            )
        return modules

    def train(self, mode: bool) -> None:
        if self.capture.model.training == mode:
            return
        self.capture.model.train(mode)
        for kind in self.kinds:
            kind.module.train(mode)

    def compile(self) -> None:
        """Compile the layers, once per kind; layers of a kind share the code."""
        for number, kind in enumerate(self.kinds, 1):
            kind.compile(f"layer kind {number} of {len(self.kinds)}")

    def tile(self, tokens: int, *, compiled: bool) -> None:
        """Run parts that act on every token alone in tiles of `tokens`; the rest stays eager."""
        for number, kind in enumerate(self.kinds, 1):
            kind.tile(tokens, f"layer kind {number} of {len(self.kinds)}", compiled=compiled)

    def attend(self, name: str) -> None:
        """Choose the implementation of attention: with masks, or one that replaces them."""
        attention.attend([self.capture.model, *(kind.module for kind in self.kinds)], name)
        self.attends_by_lengths = name == attention.BY_LENGTHS

    def set_owners(self, owners: ExpertOwners | None) -> None:
        """Send tokens to the ranks that own their experts; None: each rank has all experts."""
        self.exchanges_tokens = owners is not None
        for module in (self.capture.model, *(kind.module for kind in self.kinds)):
            set_owners(module, owners)

    def tile_epilogue(self, tokens: int) -> None:
        """Run modules after the layers in tiles of `tokens`, if they act on every token alone.

        A final norm computes in fp32: for a long row this takes more memory than a layer.
        """
        for part in self.epilogue_parts:
            part.__dict__.pop("forward", None)  # of tiles of another size
            part.forward = ChunkedOverTokens(part, tokens, lambda function, what: function)  # eager

    @cached_property
    def epilogue_parts(self) -> list[nn.Module]:
        """Modules after the layers that may run in tiles."""
        return parts(self.capture.model, self.spec.epilogue)

    def eager(self) -> AbstractContextManager[None]:
        """Within this context no compiled layer runs: for a shape that occurs only once."""
        return changed(self.kinds, compiled={})

    def encode(
        self, weights: Weights, batch: MicroBatch, frozen: FrozenParts | None = None
    ) -> Tensor:
        """The features `[N]` of a micro-batch's images and sounds; notes the calls in `batch`.

        Args: `frozen`: parts whose results are kept for the backward.

        Raises InputError: the encoders compute with weights that text uses as well.
        """
        uses = Uses()
        keeping: AbstractContextManager[Recorder | None] = nullcontext()
        if frozen is not None:
            keeping = frozen.keeping(batch.media, batch.kept, uses.touched)

        def run_layers(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Features that are added between layers count as used.
            uses.touched.update(map(id, pytree.tree_leaves((args, kwargs))))
            return forward(*args, **kwargs)

        with keeping as frozen_recorder, replaced([(self.capture.runner, "forward")], run_layers):
            recorder = Recorder(uses.touched, uses.read, frozen_recorder)
            with replaced(self._encoder_calls, recorder.call):
                self._run(stop_at_layers, weights, batch, {**batch.inputs, **batch.media}, uses)
        self._require_apart(recorder.inside, {*self._outer} - {*self.spec.media})
        batch.encoded, features = recorder.finish()
        if recorder.changed:
            raise _text_alone("the forward changes features of images or sounds in place")
        return in_one_row(features, batch.inputs["input_ids"])

    def prologue(
        self, weights: Weights, batch: MicroBatch, features_N: Tensor | None = None
    ) -> Activations:
        """The activations that enter the layers; every layer's arguments are recorded in `batch`.

        The activations have a graph if any of `weights` or `batch.rows.tables` requires gradients.
        If the arguments are recorded already, the forward ends with the last of the activations.

        Args: `features_N`: of `encode`, if the micro-batch has images or sounds.
        """
        if features_N is not None and frozenset(batch.media) not in self._supported_media:
            self._check_media(weights, batch, features_N)
            self._supported_media.add(frozenset(batch.media))
        if not self._kept_weights:  # these are frozen; the epilogue gets its own weights alone
            self._kept_weights = {n: weights[n].detach().clone() for n in self.spec.kept}
            self._outer |= self._kept_weights
        recorder = _LayerRecorder(self, batch)
        self._record(recorder, weights, features_N)
        if not batch.calls:
            if len(recorder.calls) < len(self.spec.layers):
                _expect(self.spec.layers, len(recorder.calls), None)
            for layer, call in zip(self.spec.layers, recorder.calls, strict=True):
                from_layers = {ref for ref in call.activations if ref.visit >= 0}
                if from_layers != {ref for ref in layer.inputs if ref.visit >= 0}:
                    raise InputError(
                        f"before {layer.name}, the model's forward computes on what layers gave "
                        "(as by .contiguous()); leave that out"
                    )
            batch.calls = recorder.calls
        return recorder.values

    def follow_media(self, batch: MicroBatch) -> None:
        """Count media of this batch's kinds as checked: a check needs tensors with data."""
        self._supported_media.add(frozenset(batch.media))

    def _record(
        self,
        recorder: "_LayerRecorder",
        weights: Weights,
        features_N: Tensor | None,
        uses: Uses | None = None,
    ) -> Any:
        """Run the forward with a recorder in place of layers; returns its output, if whole."""
        batch = recorder.batch

        def refuse_text(value: Tensor) -> None:
            if value.requires_grad and not reach([value]) <= {id(features_N)}:
                raise _text_alone("an encoder of images or sounds is given features of text")

        encoded: AbstractContextManager[None] = nullcontext()
        if features_N is not None:
            encoded = replayed(self._encoder_calls, batch.encoded, features_N, refuse_text)
        with encoded:
            inputs = {**batch.inputs, **batch.media}
            return self._run(recorder.record, weights, batch, inputs, uses)

    def _check_media(self, weights: Weights, batch: MicroBatch, features_N: Tensor) -> None:
        """Raises InputError: a model does more with features than to add them before layers."""
        features_N = features_N.detach().requires_grad_()
        uses = Uses()
        # Recorders return 0, then 1: if features are only added, both runs add the same.
        zeros = _LayerRecorder(self, batch)
        ones = _LayerRecorder(self, batch, ones=True)
        with torch.enable_grad(), self.capture.stop_after_trunk():
            self._record(zeros, weights, features_N, uses)
            output = self._record(ones, weights, features_N)
        self._require_apart(uses.read, self.spec.media)
        for layer, call in zip(self.spec.layers, zeros.calls, strict=True):
            pairs = ((zeros.values[ref], ones.values[ref]) for ref in call.entering)
            is_close = all(torch.allclose(*pair, rtol=0.02, atol=0.02) for pair in pairs)
            if call.activations != layer.inputs or not is_close:
                raise _beyond_sums(layer)
        if id(features_N) in reach([last_hidden(output)]):
            raise _beyond_sums(self.spec.layers[-1])

    def _require_apart(self, used: set[int], names: Iterable[str]) -> None:
        """Raises InputError: a run has used some of the parameters `names`; `used`: ids."""
        for name in names:
            if id(self._outer[name]) in used:
                raise _text_alone(
                    f"{name} is used for text and by the encoders of images or sounds, or between"
                )

    def layer(
        self,
        visit: int,
        weights: Weights,
        batch: MicroBatch,
        values: Activations,
        saves: Saves | None = None,
    ) -> Activations:
        """The activations that layer `visit` computes from `values`; see `LayerTemplate.call`."""
        args, kwargs = batch.calls[visit].arguments(values)
        layer = self.spec.layers[visit]
        bound = {**self.buffers[visit], **weights}
        counted_N = batch.counted_N if layer.kind.routes else None
        leaves = layer.kind.call(bound, args, kwargs, saves, counted_N)
        return {ref: leaves[ref.leaf] for ref in self.spec.outputs[visit]}

    def buffers_of(self, visit: int) -> list[Tensor]:
        """The buffers that layer `visit` computes with: its own, and those of its template."""
        return [*self.buffers[visit].values(), *self.spec.layers[visit].kind.module.buffers()]

    def repeats(self, visit: int, batch: MicroBatch) -> bool:
        """True if the layer may keep a graph that saves nothing; forecasts look at `batch`."""
        return self.spec.layers[visit].kind.repeats

    def epilogue(self, weights: Weights, batch: MicroBatch, values: Activations) -> Any:
        """The trunk's output (hidden states `[B, T, D]`), from the layers' outputs in `values`."""
        inputs = dict(batch.inputs)
        if not self._epilogue_has_layers and self.capture.of_transformers:
            inputs.pop("attention_mask", None)  # not needed; making a mask waits for the device
        with self.capture.stop_after_trunk():
            return self._run(self._replay(batch, values), weights, batch, inputs)

    def logits(self, weights: Weights, batch: MicroBatch, output: Any) -> Tensor:
        """`[B, T, V]` of the hidden states in a trunk output."""
        inputs = self.capture.inputs(batch.inputs)
        return self.capture.head({**self._outer, **weights}, output, inputs)

    def _replay(self, batch: MicroBatch, values: Activations) -> Any:
        """A handler that returns the layers' real outputs where they are known, else zeros."""
        visits = count()
        zeros: dict[int, Tensor] = {}  # by the example's id: each costs a kernel launch

        def handler(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            visit = next(visits)
            _expect(self.spec.layers, visit, module)
            return _output_of(self.spec.layers[visit], visit, known_or_zeros)

        def known_or_zeros(ref: Ref, example: Tensor) -> Tensor:
            if ref in values:
                return values[ref]
            if id(example) not in zeros:
                zeros[id(example)] = self.zeros(example, batch)
            return zeros[id(example)]

        return handler

    def zeros(self, example: Tensor, batch: MicroBatch) -> Tensor:
        """Zeros like a layer's output in the structure run, of this batch's rows and tokens."""
        dtype = self.dtype if example.is_floating_point() else example.dtype
        shape = example.shape
        if shape[:2] == PROBE_SHAPE:
            shape = batch.inputs["input_ids"].shape + shape[2:]
        return torch.zeros((), device=self.device, dtype=dtype).expand(shape)

    def _run(
        self,
        handler: Any,
        weights: Weights,
        batch: MicroBatch,
        inputs: Mapping,
        uses: Uses | None = None,
    ) -> Any:
        """Run the forward with `handler` for layers; note in `uses` the tensors that it reads."""
        outer = {**self._outer, **{k: w for k, w in weights.items() if k in self._outer}}

        def unwatched(*call: Any) -> Any:
            with without_torch_function():  # only the model's own operations are noted
                return handler(*call)

        documents = batch.documents if self.attends_by_lengths else {}
        arguments = {**self.capture.inputs(inputs), **documents}
        shape = batch.inputs["input_ids"].shape
        if uses is None and shape not in self._one_document_calls and _gives_ids_alone(batch):
            self._one_document_calls[shape] = set()
            uses = Uses(derived={id(v): v for v in arguments.values() if isinstance(v, Tensor)})
        find = partial(self._document_indices, batch, uses)
        has_lengths = changed([attention.FORWARD], has_lengths=bool(documents))
        finding = finding_once(batch.document_indices, find, padded=batch.counted_N is not None)
        problem = f"a micro-batch with {', '.join(batch.media)} cannot be run"
        remedy = "give all that the model's processor makes, and cut off none of its tokens"
        with explained(problem, remedy, of=ValueError if batch.media else ()), has_lengths, finding:
            return self.capture.forward(unwatched, outer, arguments, batch.rows, uses)

    def _document_indices(
        self,
        batch: MicroBatch,
        uses: Uses | None,
        find: Callable[[Tensor], Tensor | None],
        position_ids: Tensor,
    ) -> Tensor | None:
        """The index of each token's document in packed rows; None: each row is one document.

        `find` reads positions from the device and waits for it, so it is called last. Positions in
        the batch are known on the CPU. Those that a model makes itself are the same for all rows
        of a length, unless it computes them from the token ids.
        """
        of_batch = batch.inputs.get("position_ids")
        if of_batch is not None and batch.is_packed is not None:
            of_batch = of_batch if of_batch.ndim == 2 else of_batch[0]
            if identity(of_batch) == identity(position_ids):
                starts = attention.document_starts(of_batch)
                return starts.cumsum(-1) - 1 if batch.is_packed else None
        one_document = self._one_document_calls.get(batch.inputs["input_ids"].shape, set())
        call = len(batch.document_indices)
        if call in one_document and _gives_ids_alone(batch):
            return None
        indices = find(position_ids)
        if indices is None and uses is not None and id(position_ids) not in uses.derived:
            one_document.add(call)
        return indices


class _LayerRecorder:
    """Records the layers' arguments in a run of the forward; in place of layers it returns zeros.

    An argument with a graph comes from the prologue, or from a layer, maybe with a tensor added to
    the layer's result (images or sounds). The run ends when all such activations are known.
    """

    def __init__(self, program: ModelProgram, batch: MicroBatch, *, ones: bool = False) -> None:
        """Args: `ones`: results are 1, not 0, and the run does not end before the trunk does."""
        self.batch = batch
        self.calls: list[Call] = []
        self.values: Activations = {}  # activations that enter the layers
        self._layers, self._make_zeros = program.spec.layers, program.zeros
        self._ones = ones
        self._num_entering = len(set[Ref]().union(*(call.entering for call in batch.calls)))
        self._traced: dict[Hashable, Ref | Sum] = {}  # arguments, by the tensor's identity
        self._made_by: dict[int, Ref] = {}  # results, by the id of the leaf of their graph
        self._alive: list[Any] = []  # tensors whose ids and memory no others may get in this run

    def record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Note the arguments of the next layer, and return its results."""
        visit = len(self.calls)
        is_next = module in [layer.module for layer in self._layers[visit : visit + 1]]
        if self.batch.media and not is_next:
            raise _text_alone("with images or sounds, the forward calls other layers than for text")
        _expect(self._layers, visit, module)
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        self._alive.append(leaves)
        self.calls.append(Call([self._argument(visit, leaf) for leaf in leaves], tree_spec))
        is_last = len(self.calls) == len(self._layers) and not self._ones
        if is_last or (self.batch.calls and len(self.values) == self._num_entering):
            raise Reached(None)
        return _output_of(self._layers[visit], visit, self._result)

    def _argument(self, visit: int, leaf: Any) -> Any:
        """The Ref or Sum of a layer's argument; an argument that is no activation unchanged."""
        if not isinstance(leaf, Tensor):
            return leaf
        key = identity(leaf)
        if key not in self._traced and leaf.requires_grad:
            self._traced[key] = self._entering(visit, leaf)
        return self._traced.get(key, leaf)

    def _entering(self, visit: int, leaf: Tensor) -> Ref | Sum:
        """Note a new activation of the prologue, or a tensor that is added to a layer's result."""
        origins = {self._made_by[i] for i in reach([leaf]) if i in self._made_by}
        if not origins:
            ref = Ref(PROLOGUE, sum(ref.visit == PROLOGUE for ref in self.values))
            self.values[ref] = leaf
            return ref
        ref = Ref(ADDED, visit)
        if len(origins) > 1 or ref in self.values:
            raise _beyond_sums(self._layers[visit])
        self.values[ref] = leaf - 1 if self._ones else leaf  # without the layer's result
        return Sum(origins.pop(), ref)

    def _result(self, ref: Ref, example: Tensor) -> Tensor:
        """A layer's result, with a graph if images or sounds may be added to it."""
        leaf = self._make_zeros(example, self.batch)
        if self.batch.media and leaf.is_floating_point():
            scalar = torch.full((), float(self._ones), device=leaf.device, dtype=leaf.dtype)
            leaf = scalar.requires_grad_().expand(leaf.shape)
            self._made_by[id(scalar)] = ref
            self._alive.append(scalar)
        self._traced[identity(leaf)] = ref
        self._alive.append(leaf)
        return leaf


def _output_of(layer: Layer, visit: int, make: Callable[[Ref, Tensor], Tensor]) -> Any:
    """The outputs of a layer in the forward's structure; `make` returns each tensor."""
    leaves = [
        make(Ref(visit, index), leaf) if isinstance(leaf, Tensor) else leaf
        for index, leaf in enumerate(layer.kind.example)
    ]
    return pytree.tree_unflatten(leaves, layer.kind.output_spec)


def _gives_ids_alone(batch: MicroBatch) -> bool:
    return batch.inputs.keys() == {"input_ids"} and not batch.media


def _expect(layers: Sequence[Layer], visit: int, called: nn.Module | None) -> None:
    """Raises RunFailed: the forward has called another layer than in the structure run."""
    if visit == len(layers):
        raise RunFailed("the model's forward calls more layers than at first")
    if layers[visit].module is not called:
        name = layers[visit].name
        raise RunFailed(f"the model's forward left out {name}, which it called at first")


def _beyond_sums(layer: Layer) -> InputError:
    return _text_alone(
        f"at {layer.name}, the forward does more with features of images or sounds than to add "
        "them to the hidden states"
    )


def _text_alone(why: str) -> InputError:
    return InputError(f"{why}: such a model is trained on text alone; leave the media out")


def _own_buffers(
    layer: Layer, types: Mapping[str, torch.dtype], moved: Container[str]
) -> dict[str, Tensor]:
    """Buffers, in compute dtypes, that differ from the layer's template or that steps move."""
    template_buffers = dict(layer.kind.module.named_buffers())
    buffers: dict[str, Tensor] = {}
    for name, buffer in layer.module.named_buffers():
        full = f"{layer.name}.{name}"
        value, shared = buffer.to(types.get(full, buffer.dtype)), template_buffers[name]
        if full in moved or value.dtype != shared.dtype or not torch.equal(value, shared):
            buffers[name] = value
    return buffers
