"""Losses: functions of what the head says of each token, never of all logits at once."""

from megatrain.loss.base import IGNORED, Loss, Statistics, given_loss, num_labelled, targets_of
from megatrain.loss.distill import Distillation
from megatrain.loss.joint import JointLoss, as_numbers
from megatrain.loss.policy import GRPO, RLOO, ImportanceSampling, PolicyLoss
from megatrain.loss.preferences import (
    DPO,
    KTO,
    ORPO,
    TOKEN_SCORE,
    DpoVariant,
    PairLoss,
    Replies,
    Reward,
    ScoreWeights,
    SimPO,
    TokenScore,
)
from megatrain.loss.tokens import (
    CROSS_ENTROPY,
    SCORE,
    TOKEN_WEIGHTS,
    CrossEntropy,
    LabelSmoothing,
    Score,
    TokenWeights,
    TopTokens,
    ZLoss,
    cross_entropy_sum,
)

__all__ = [
    "CROSS_ENTROPY",
    "DPO",
    "GRPO",
    "IGNORED",
    "KTO",
    "ORPO",
    "RLOO",
    "SCORE",
    "TOKEN_SCORE",
    "TOKEN_WEIGHTS",
    "CrossEntropy",
    "Distillation",
    "DpoVariant",
    "ImportanceSampling",
    "JointLoss",
    "LabelSmoothing",
    "Loss",
    "PairLoss",
    "PolicyLoss",
    "Replies",
    "Reward",
    "Score",
    "ScoreWeights",
    "SimPO",
    "Statistics",
    "TokenScore",
    "TokenWeights",
    "TopTokens",
    "ZLoss",
    "as_numbers",
    "cross_entropy_sum",
    "given_loss",
    "num_labelled",
    "targets_of",
]
