"""What the engine has to know of a model; `probe` reads it off the model's own forward."""

from dataclasses import dataclass, field

from torch import nn

from megatrain.model.kind import Kind
from megatrain.model.skeleton import PROLOGUE, Ref, Skeleton

PROBE_SHAPE = (2, 8)  # rows, tokens of the structure run


@dataclass
class Layer:
    """One visit of the stack.

    Attributes:
        name: Hugging Face path of the layer module.
        inputs: activations that it reads, in argument order.
    """

    name: str
    module: nn.Module
    kind: Kind
    inputs: list[Ref]


@dataclass
class Outline:
    """The model as the engine sees it.

    Attributes:
        layers: in visiting order.
        outputs: per layer, the activations that anything later reads.
        epilogue_inputs: activations that the epilogue reads.
        gathered: embedding tables looked up only by the batch's own token ids; their rows are
            gathered on the host.
        constants: token ids whose rows the prologue reads whatever the batch holds.
        prologue, epilogue: names of the other parameters used before and after the layers.
        fixed: those of them that no gradient reaches (plain training leaves them alone, too).
        unused: parameters that text training never touches; they stay as they are.
    """

    skeleton: Skeleton
    layers: list[Layer]
    epilogue_inputs: list[Ref]
    gathered: list[str]
    constants: list[int]
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
