"""Losses of embeddings: a row's embedding is the mean of its labelled tokens' hidden states.

Legend: B rows of a micro-batch, R of a step, T tokens of a row, N of a micro-batch, D width,
P pairs of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, ClassHead, JointLoss, Loss, Tensors, Weighed
from megatrain.loss.preferences import check_numbers

Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class Embedding(Loss):
    """The embedding of each row `[B, D]`, not normalised: the mean over its labelled tokens."""

    embeds: ClassVar[bool] = True

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return logits_NV  # these are hidden states: the model has no head

    def pooled(self, values_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        return values_BTD.sum(1) / _counts(targets_BT)


@dataclass(frozen=True)
class Contrastive(Embedding, JointLoss):
    """InfoNCE: the mean over anchors of a cross entropy whose right class is the positive text.

    The logits of an anchor are its cosine similarities, times `scale`, with the positives and hard
    negatives of all anchors of the step (van den Oord et al., 2018,
    https://arxiv.org/abs/1807.03748, equation 4; sentence-transformers'
    `MultipleNegativesRankingLoss`, symmetric `MultipleNegativesSymmetricRankingLoss`). With
    `symmetric` half of the loss is the same with positives and anchors exchanged.

    The model has no head (`AutoModel`). Labels are 0 at the tokens whose hidden states are
    averaged, -100 elsewhere. A micro-batch has these floating-point numbers `[B, T]`, read at each
    row's first label:
        pair: the number of the row's anchor in the step; its texts may be in any micro-batches.
        text: 0 in the anchor, 1 in its positive, 2 and more in its hard negatives.

    `pooling` and `negatives` (hard ones of each anchor) decide how a run makes rows of its data.

    Raises InputError: `scale` is not above 0, `negatives` below 0, or `pooling` unknown.
    """

    scale: float = 20.0
    symmetric: bool = False
    pooling: Pooling = "last"
    negatives: int = 0
    inputs: ClassVar[tuple[str, ...]] = ("pair", "text")
    reads: ClassVar[str] = "embeddings"
    depends_on_step: ClassVar[bool] = True
    limits: ClassVar[dict[str, str]] = {"scale": "above 0", "negatives": "0 or more"}

    @property
    def lines(self) -> int:
        """Rows of tokens for each anchor of the data."""
        return 2 + self.negatives

    @property
    def head(self) -> ClassHead:
        return ClassHead((), pooling=self.pooling)

    def similarities(
        self, rows_RD: Tensor, targets_R: Tensor, pair_R: Tensor, text_R: Tensor
    ) -> Tensor:
        """Anchors' logits `[P, R - P]`: positives, first negatives, ... in the order of pairs."""
        used = targets_R != IGNORED
        pair, text = pair_R[used].long(), text_R[used].long()
        order = (text * (int(pair.max()) + 1) + pair).argsort()
        embeddings = F.normalize(rows_RD[used][order].float(), dim=1)
        count = int((text == 0).sum())
        return embeddings[:count] @ embeddings[count:].T * self.scale

    def joint(self, rows_RD: Tensor, targets_R: Tensor, *extras: Tensor) -> Tensor:
        scores = self.similarities(rows_RD, targets_R, *extras)
        right = torch.arange(len(scores), device=scores.device)
        loss = F.cross_entropy(scores, right, reduction="sum")
        if not self.symmetric:
            return loss
        return (loss + F.cross_entropy(scores[:, : len(scores)].T, right, reduction="sum")) / 2

    def measures(self, rows_RD: Tensor, targets_R: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """The share of anchors whose positive is nearer than all other texts."""
        scores = self.similarities(rows_RD, targets_R, *extras)
        as_near = (scores >= scores.diagonal()[:, None]).sum(1)
        return {"accuracy": (as_near == 1).double().mean()}

    def weigh(
        self, log_probs: Tensors, targets: Tensors, extras: Sequence[Tensors], normaliser: float
    ) -> Weighed:
        row_targets, row_extras = _first_labels(targets, extras)
        losses, slopes, measured = super().weigh(log_probs, row_targets, row_extras, normaliser)
        token_slopes = [
            (slopes_BD / _counts(target))[:, None].expand(*target.shape, -1)
            for slopes_BD, target in zip(slopes, targets, strict=True)
        ]
        return losses, token_slopes, measured

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of anchors. Raises InputError: a pair lacks a text, or has a text twice."""
        row_targets, row_extras = _first_labels(targets, extras)
        used = torch.cat(list(row_targets)) != IGNORED
        pair, text = (torch.cat(part)[used] for part in zip(*row_extras, strict=True))
        check_numbers("pair", pair)
        check_numbers("text", text)
        texts = [*zip(pair.tolist(), text.tolist(), strict=True)]
        pairs = {number for number, _ in texts}
        if len({*texts}) < len(texts) or not {(n, k) for n in pairs for k in (0, 1)} <= {*texts}:
            raise InputError("each pair of a step needs one row of text 0 and one of text 1")
        return len(pairs)


def _counts(targets_BT: Tensor) -> Tensor:
    """The number of labelled tokens of each row `[B, 1]`, at least 1."""
    return (targets_BT != IGNORED).sum(1, keepdim=True).clamp(min=1)


def _first_labels(targets: Tensors, extras: Sequence[Tensors]) -> tuple[Tensors, list[Tensors]]:
    """Targets and loss inputs of each row `[B]`, taken at its first label."""
    firsts = [(target != IGNORED).int().argmax(1, keepdim=True) for target in targets]
    parts = zip(targets, extras, firsts, strict=True)
    rows = [
        [v.gather(1, first)[:, 0] for v in (target, *inputs)] for target, inputs, first in parts
    ]
    return [target for target, *_ in rows], [inputs for _, *inputs in rows]
