"""Losses of a step; each reads the logits of some tokens at a time, never all logits."""

from megatrain.loss.base import (
    CROSS_ENTROPY,
    IGNORED,
    ClassHead,
    CrossEntropy,
    Distillation,
    JointLoss,
    LabelSmoothing,
    Loss,
    MultiLabel,
    Score,
    Sloped,
    Tensors,
    TokenWeights,
    TopTokens,
    Weighed,
    as_numbers,
    cross_entropy_sum,
    log_probs_of,
    num_labelled,
    require_loss,
    targets_of,
)
from megatrain.loss.embeddings import Contrastive, Embedding
from megatrain.loss.policy import GRPO
from megatrain.loss.preferences import DPO, DpoVariant, PairLoss, Replies, Reward, TokenScore
