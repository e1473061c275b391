"""The tensors of a step's micro-batches, which the engine's units pass to one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.model.capture import Call, Ref, Rows
from megatrain.model.media import Encoded, Kept

Activations = dict[Ref, Tensor]
Weights = Mapping[str, Tensor]


class TrialRun(NamedTuple):
    """The layers' arguments and the losses `[B, T]` of micro-batches that try a model."""

    calls: Sequence[Sequence[Call]]
    losses: list[Tensor]


@dataclass
class MicroBatch:
    """One micro-batch on the device."""

    inputs: dict[str, Tensor]  # `input_ids` `[B, T]` and other arguments of the model's forward
    targets: Tensor | None  # `[B, T]` token that each position predicts, -100 for none
    rows: Rows  # the step's embedding rows, as this micro-batch indexes them
    loss: Loss = CROSS_ENTROPY
    extras: Sequence[Tensor] = ()  # other inputs of the loss, in its order: `[B, T]`, `[B, T, K]`
    documents: Mapping[str, Any] = field(default_factory=dict)  # `length_arguments` of packed rows
    counted_N: Tensor | None = None  # 1 for a token, 0 for padding; None: all are tokens
    calls: list[Call] = field(default_factory=list)  # of layers, once the prologue has run
    document_indices: list[Tensor | None] = field(default_factory=list)  # see `finding_once`
    is_packed: bool | None = None  # positions restart within a row; None: only the device knows
    media: dict[str, Tensor] = field(default_factory=dict)  # the forward's images and sounds
    encoded: list[Encoded] = field(default_factory=list)  # calls of encoders, once these have run
    kept: list[Kept] = field(default_factory=list)  # of frozen parts of encoders (`FrozenParts`)


@dataclass
class Batch:
    """This rank's micro-batches of one step."""

    micro: list[MicroBatch]
    normaliser: float  # the divisor of the loss, over all micro-batches of all ranks
    num_tokens: int  # positions of this rank, padding included
    # the token ids whose rows are gathered (CPU); `micro[i].rows.index` points into it. With
    # several ranks: the ids of all ranks' tokens, in a block of equal size for each rank that keeps
    # their rows; a block is padded with an id of its own or of an earlier block.
    unique_U: Tensor
    seed: int  # of this step's random numbers
    first: int = 0  # the number of `micro[0]` in this rank's step
    # each micro-batch's targets and other loss inputs, on the device; of all ranks in a joint loss
    loss_inputs: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    measured: dict[str, Tensor] = field(default_factory=dict)  # of a joint loss, after the head
    loads: list[Tensor] = field(default_factory=list)  # tokens of experts `[L, E]`, after the head
    before: int = 0  # micro-batches of earlier ranks; seeds depend on the number among all ranks
    own: slice = field(default_factory=lambda: slice(None))  # of `unique_U`, kept by this rank
    all_tokens: int = 0  # positions of all ranks, in the caller's micro-batches
    most_micro: int = 0  # micro-batches of the rank that has most; others may have empty passes
    # each micro-batch's weight in the routers' loss; None: it is one loss of all tokens together
    router_shares: Sequence[float] | None = None
    has_media: bool = False  # True if any rank's micro-batch has images or sounds
    idle: int = 0  # the number of last micro-batches without labels, which only exchange tokens

    def passes(self, count: int) -> list["Batch"]:
        """The micro-batches, in order, as at most `count` batches of about equal size."""
        count = min(count, max(self.most_micro, len(self.micro)))
        ends = [len(self.micro) * part // count for part in range(count + 1)]
        return [
            replace(self, micro=self.micro[start:stop], first=start)
            for start, stop in pairwise(ends)
        ]
