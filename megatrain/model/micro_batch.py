"""The tensors of a step's micro-batches, as units pass them on."""

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
        documents: arguments that say where documents of packed rows end (model/documents.py).
        counted_N: 1 for a token, 0 for padding; None: all are tokens.
        calls: the layers' arguments, known once the prologue has run.
        document_indices: of each token in packed rows, one tensor for each time the forward asks.
        is_packed: the positions in `inputs` start anew within a row; None: only the device knows.
        media: the forward's arguments that describe images and sounds.
        encoded: the calls of their encoders, known once these have run.
        kept: what frozen parts of encoders have computed, for the backward of the others.
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
    """This rank's micro-batches of one step.

    Attributes:
        normaliser: what the loss is divided by, over all micro-batches of all ranks.
        num_tokens: all positions, padding included.
        unique_U: the token ids whose rows are gathered (CPU); `micro[i].rows.index` points into it.
            With several ranks: the ids of all their tokens, in one block of equal size for each
            rank that keeps their rows; a block is filled up with an id of its own or of an earlier
            block.
        seed: makes the random numbers of this step.
        first: number of `micro[0]` in the step.
        before: micro-batches of the ranks before this one; random numbers depend on a
            micro-batch's number among those of all ranks.
        own: the slice of `unique_U` whose rows this rank keeps.
        all_tokens: positions of all ranks, as the caller gave them.
        most: micro-batches of the rank that has the most; others may have passes without any.
        idle: the last micro-batches that count nothing, where ranks exchange tokens equally often.
        has_media: True if any rank's micro-batch has images or sounds.
        loss_inputs: each micro-batch's targets and the loss's other inputs, on the device; for a
            joint loss the micro-batches of all ranks.
        measured: the measures of a joint loss, on the device, once the head has been visited.
        loads: the tokens of each expert `[L, E]`, on the device, once the head has been visited.
        router_shares: the weight of each micro-batch's router loss; None: routers have one loss of
            all tokens together.
    """

    micro: list[MicroBatch]
    normaliser: float
    num_tokens: int
    unique_U: Tensor
    seed: int
    first: int = 0
    loss_inputs: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    measured: dict[str, Tensor] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)
    before: int = 0
    own: slice = field(default_factory=lambda: slice(None))
    all_tokens: int = 0
    most: int = 0
    router_shares: Sequence[float] | None = None
    has_media: bool = False
    idle: int = 0

    def passes(self, count: int) -> list["Batch"]:
        """Split the micro-batches, in order, into at most `count` groups of about equal size."""
        count = min(count, max(self.most, len(self.micro)))
        ends = [len(self.micro) * part // count for part in range(count + 1)]
        return [
            replace(self, micro=self.micro[start:stop], first=start)
            for start, stop in pairwise(ends)
        ]
