"""All that the engine knows of a model: `probe` finds it in a run of the model's own forward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model.capture import PROLOGUE, Capture, Ref, with_hidden
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.routers import BIASES, RouterLoss
from megatrain.tile.formats import WeightFormat

PROBE_SHAPE = (2, 8)  # rows, tokens of the structure run
PROBE_IDS = torch.arange(16).remainder(4).view(PROBE_SHAPE)


@dataclass
class Layer:
    """One layer of the stack."""

    name: str  # path of the layer's module in the model
    module: nn.Module
    kind: LayerTemplate
    inputs: list[Ref]  # activations that the layer reads, in argument order


@dataclass
class Structure:
    """The part of a model's structure that can be written to a file."""

    epilogue_inputs: list[Ref]  # activations that the epilogue reads
    # embedding tables that are read only by the batch's token ids: the host gathers their rows
    gathered: list[str]
    constants: list[int]  # token ids whose rows the prologue reads for any batch
    prologue: list[str]  # names of the other parameters that are used before the layers
    epilogue: list[str]  # names of those that are used after the layers
    head: list[str]  # names of the epilogue's parameters that are used after the trunk
    num_logits: int
    fixed: list[str]  # parameters that the forward uses, but no gradient reaches
    unused: list[str]  # parameters that no training uses; they stay as they are
    media: list[str] = field(default_factory=list)  # parameters that text alone does not use
    kept: list[str] = field(default_factory=list)  # of `fixed`, also used after the layers
    label_shift: int = 1  # tokens from logits to the label with which they are compared
    wide: set[str] = field(default_factory=set)  # parameters with more bits in the source than bf16
    wide_in_bf16: set[str] | None = None  # `in_fp32` of bf16; None: the model's code is asked
    stacks: list[str] = field(default_factory=list)  # names of stacked experts' parameters
    router_loss: RouterLoss | None = None  # of the configuration; None: nothing is trained


@dataclass(kw_only=True)
class ModelSpec(Structure):
    """The model as the engine sees it.

    Attributes:
        outputs: of each layer, the activations that a later layer or the epilogue reads.
        trunk: the trunk's output without its hidden states.
        packed: formats of frozen parameters that are not in bf16, by name.
        routed: of each layer with routers the last activation, their sums, if all have one shape.
    """

    capture: Capture
    layers: list[Layer]
    trunk: Any
    packed: Mapping[str, WeightFormat] = field(default_factory=dict)
    outputs: list[list[Ref]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = [layer.kind for layer in self.layers]
        self.routed = [Ref(v, len(k.example) - 1) for v, k in enumerate(kinds) if k.routes]
        if len({kinds[ref.visit].example[-1].shape for ref in self.routed}) > 1:
            self.routed = []
        read = self.read.union(self.epilogue_inputs, self.routed)
        self.outputs = [
            sorted(ref for ref in read if ref.visit == visit) for visit in range(len(self.layers))
        ]
        self.prologue_outputs = sorted(ref for ref in read if ref.visit == PROLOGUE)

    @property
    def routed_shape(self) -> tuple[int, int]:
        """The number of layers with routers, and of the sums of each."""
        return len(self.routed), self.layers[self.routed[0].visit].kind.example[-1].shape[1]

    @property
    def balances(self) -> bool:
        """True if a step's loss includes a loss of the routers, over all tokens but padding."""
        return bool(self.routed and self.router_loss and self.router_loss.is_loss)

    @cached_property
    def router_biases(self) -> dict[str, int]:
        """The biases of routers that steps move: name -> its layer's row in the experts' loads."""
        if not (self.routed and self.router_loss and self.router_loss.bias_rate):
            return {}
        shape = (self.router_loss.experts(self.routed_shape[1]),)
        layers = [self.layers[ref.visit] for ref in self.routed]
        return {
            f"{layer.name}.{name}": row
            for row, layer in enumerate(layers)
            for name, buffer in layer.module.named_buffers()
            if name.rpartition(".")[2] in BIASES and buffer.shape == shape
            if ".original_module." not in name  # PEFT trains a copy of these
        }

    def logits(self, weights: dict[str, Tensor], hidden_BTD: Tensor) -> Tensor:
        """The head's logits of hidden states; `weights` may have only some rows of its table."""
        ids = torch.zeros(hidden_BTD.shape[:2], dtype=torch.long)
        inputs = self.capture.inputs({"input_ids": ids})
        return self.capture.head(weights, with_hidden(self.trunk, hidden_BTD), inputs)

    def in_fp32(self, dtype: torch.dtype) -> set[str]:
        """Parameters that transformers keeps in fp32 in a model of another `dtype`."""
        if dtype == torch.float32:
            return set()
        if self.wide_in_bf16 is not None:
            return self.wide_in_bf16
        from megatrain.model.build import loaded_types

        types = loaded_types(self.capture.model, dtype)
        outside = {*self.gathered, *self.unused}
        names = {name for name, _ in self.capture.model.named_parameters()} - outside
        return {name for name in names if types.get(name, dtype) == torch.float32}

    @cached_property
    def read(self) -> set[Ref]:
        return {ref for layer in self.layers for ref in layer.inputs}

    @cached_property
    def live_after(self) -> list[frozenset[Ref]]:
        """Of each layer, the activations that are read after it."""
        live = [frozenset((*self.epilogue_inputs, *self.routed))]
        for layer in reversed(self.layers):
            live.append(live[-1].union(layer.inputs))
        return live[-2::-1]
