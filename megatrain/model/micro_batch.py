"""The tensors of a step's micro-batches, which the engine's units pass to one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.model.capture import Call, Ref, Rows
from megatrain.model.media import Encoded, Kept

Activations = dict[Ref, Tensor]
Weights = Mapping[str, Tensor]


@dataclass
class MicroBatch:
    """One micro-batch on the device.

    Attributes:
        inputs: `input_ids` `[B, T]` and other arguments of the model's forward.
        targets: `[B, T]` token that each position predicts, -100 for none.
        rows: the step's embedding rows, as this micro-batch indexes them.
        extras: `[B, T]` or `[B, T, K]`, the loss's inputs beside the targets, in its order.
        documents: the forward's arguments with the ends of packed documents (model/documents.py).
        counted_N: 1 for a token, 0 for padding; None: all are tokens.
        calls: the layers' arguments, known once the prologue has run.
        document_indices: the document of each token in packed rows, for each time the forward asks.
        is_packed: True if positions in `inputs` restart within a row; None: only the device knows.
        media: the forward's arguments that describe images and sounds.
        encoded: the calls of encoders, known once these have run.
        kept: results of frozen parts of encoders, for the backward of trained parts.
    """

    inputs: dict[str, Tensor]
    targets: Tensor | None
    rows: Rows
    loss: Loss = CROSS_ENTROPY
    extras: Sequence[Tensor] = ()
    documents: Mapping[str, Any] = field(default_factory=dict)
    counted_N: Tensor | None = None
    calls: list[Call] = field(default_factory=list)
    document_indices: list[Tensor | None] = field(default_factory=list)
    is_packed: bool | None = None
    media: dict[str, Tensor] = field(default_factory=dict)
    encoded: list[Encoded] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


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
    # the targets and other inputs of each micro-batch's loss, on the device; for a joint loss of
    # the micro-batches of all ranks
    loss_inputs: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    # the measures of a joint loss, on the device, once the head has been visited
    measured: dict[str, Tensor] = field(default_factory=dict)
    # the tokens of each expert `[L, E]`, on the device, once the head has been visited
    loads: list[Tensor] = field(default_factory=list)
    # micro-batches of the ranks before this one; random numbers depend on a micro-batch's number
    # among those of all ranks
    before: int = 0
    # the slice of `unique_U` whose rows this rank keeps
    own: slice = field(default_factory=lambda: slice(None))
    all_tokens: int = 0  # positions of all ranks, in the caller's micro-batches
    most: int = 0  # micro-batches of the rank that has most; others may have passes without any
    # the weight of each micro-batch's router loss; None: routers have one loss of all tokens
    # together
    router_shares: Sequence[float] | None = None
    has_media: bool = False  # True if any rank's micro-batch has images or sounds
    idle: int = 0  # the number of last micro-batches without labels, which only exchange tokens

    def passes(self, count: int) -> list["Batch"]:
        """The micro-batches, in order, as at most `count` batches of about equal size."""
        count = min(count, max(self.most, len(self.micro)))
        ends = [len(self.micro) * part // count for part in range(count + 1)]
        return [
            replace(self, micro=self.micro[start:stop], first=start)
            for start, stop in pairwise(ends)
        ]
