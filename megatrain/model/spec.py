"""All that the engine knows of a model; `probe` reads it off the model's own forward."""

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
    """One visit of the stack.

    Attributes:
        name: Hugging Face path of the layer module.
        inputs: activations that it reads, in argument order.
    """

    name: str
    module: nn.Module
    kind: LayerTemplate
    inputs: list[Ref]


@dataclass
class Structure:
    """All of a model's structure that can be written down.

    Attributes:
        label_shift: how many tokens a label lies behind the logits that it is compared with.
        epilogue_inputs: activations that the epilogue reads.
        gathered: embedding tables looked up only by the batch's own token ids; their rows are
            gathered on the host.
        constants: token ids whose rows the prologue reads whatever the batch holds.
        prologue, epilogue: names of the other parameters used before and after the layers.
        head: names of those that the head computes with, after the trunk.
        fixed: parameters that no gradient reaches (plain training leaves them alone, too).
        unused: parameters that no training touches; they stay as they are.
        media: parameters that text alone never touches, of a model that encodes images or sounds.
        wide: parameters whose source has bits that bf16 does not hold.
        wide_in_bf16: `in_fp32` of bf16, of a structure without code; None: the model's code says.
        router_loss: what the configuration asks of the routers; None: nothing is trained.
    """

    epilogue_inputs: list[Ref]
    gathered: list[str]
    constants: list[int]
    prologue: list[str]
    epilogue: list[str]
    head: list[str]
    num_logits: int
    fixed: list[str]
    unused: list[str]
    media: list[str] = field(default_factory=list)
    label_shift: int = 1
    wide: set[str] = field(default_factory=set)
    wide_in_bf16: set[str] | None = None
    stacks: list[str] = field(default_factory=list)
    router_loss: RouterLoss | None = None


@dataclass(kw_only=True)
class ModelSpec(Structure):
    """The model as the engine sees it.

    Attributes:
        outputs: per layer, the activations that anything later reads.
        trunk: the trunk's output without its hidden states.
        packed: how frozen parameters are kept that are not kept in bf16.
        routed: activations with the sums of each layer's routers, if they are alike.
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
        """The number of layers with routers, and of each one's sums."""
        return len(self.routed), self.layers[self.routed[0].visit].kind.example[-1].shape[1]

    @property
    def balances(self) -> bool:
        """True if a step's loss includes one of the routers, over all tokens except padding."""
        return bool(self.routed and self.router_loss and self.router_loss.is_loss)

    @cached_property
    def router_biases(self) -> dict[str, int]:
        """By name each bias of a router that steps move: its layer's row in the experts' loads."""
        if not (self.routed and self.router_loss and self.router_loss.bias_rate):
            return {}
        shape = (self.router_loss.experts(self.routed_shape[1]),)
        layers = [self.layers[ref.visit] for ref in self.routed]
        return {
            f"{layer.name}.{name}": row
            for row, layer in enumerate(layers)
            for name, buffer in layer.module.named_buffers()
            if name.rpartition(".")[2] in BIASES and buffer.shape == shape
            if ".original_module." not in name  # of which PEFT trains a copy
        }

    def logits(self, weights: dict[str, Tensor], hidden_BTD: Tensor) -> Tensor:
        """The head's logits of hidden states, with some of its table's rows or all of them."""
        ids = torch.zeros(hidden_BTD.shape[:2], dtype=torch.long)
        inputs = self.capture.inputs({"input_ids": ids})
        return self.capture.head(weights, with_hidden(self.trunk, hidden_BTD), inputs)

    def in_fp32(self, dtype: torch.dtype) -> set[str]:
        """Parameters that transformers computes with in fp32 in a model of another `dtype`."""
        if dtype == torch.float32:
            return set()
        if self.wide_in_bf16 is not None:
            return self.wide_in_bf16
        from megatrain.model.build import loaded_types

        types, outside = loaded_types(self.capture.model, dtype), {*self.gathered, *self.unused}
        names = {name for name, _ in self.capture.model.named_parameters()} - outside
        return {name for name in names if types.get(name, dtype) == torch.float32}

    @cached_property
    def read(self) -> set[Ref]:
        """Activations that layers read."""
        return {ref for layer in self.layers for ref in layer.inputs}

    @cached_property
    def live_after(self) -> list[frozenset[Ref]]:
        """Per layer, the activations that anything later reads."""
        live = [frozenset((*self.epilogue_inputs, *self.routed))]
        for layer in reversed(self.layers):
            live.append(live[-1].union(layer.inputs))
        return live[-2::-1]
