"""Losses: functions of what the head says of each token, never of all logits at once."""

from megatrain.loss.base import IGNORED, Loss, Statistics, given_loss, num_labelled, targets_of
from megatrain.loss.chunks import (
    Summed,
    chunked_loss,
    chunked_loss_gradients,
    chunked_losses,
    larger_logits,
    largest_logits,
    range_gradient,
    range_logits,
    range_statistics,
)
from megatrain.loss.cross_entropy import CROSS_ENTROPY, CrossEntropy, cross_entropy_sum
from megatrain.loss.distill import Distillation
from megatrain.loss.dpo import DPO
from megatrain.loss.importance import ImportanceSampling
from megatrain.loss.joint import JointLoss, as_numbers
from megatrain.loss.kto import KTO
from megatrain.loss.label_smoothing import LabelSmoothing
from megatrain.loss.policy import GRPO, RLOO, PolicyLoss
from megatrain.loss.replies import PairLoss
from megatrain.loss.reward import TOKEN_SCORE, Reward, ScoreWeights, TokenScore
from megatrain.loss.score import SCORE, Score
from megatrain.loss.teacher import TopTokens
from megatrain.loss.token_weights import TOKEN_WEIGHTS, TokenWeights
from megatrain.loss.unreferenced import ORPO, SimPO
from megatrain.loss.z_loss import ZLoss

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
    "ImportanceSampling",
    "JointLoss",
    "LabelSmoothing",
    "Loss",
    "PairLoss",
    "PolicyLoss",
    "Reward",
    "Score",
    "ScoreWeights",
    "SimPO",
    "Statistics",
    "Summed",
    "TokenScore",
    "TokenWeights",
    "TopTokens",
    "ZLoss",
    "as_numbers",
    "chunked_loss",
    "chunked_loss_gradients",
    "chunked_losses",
    "cross_entropy_sum",
    "given_loss",
    "larger_logits",
    "largest_logits",
    "num_labelled",
    "range_gradient",
    "range_logits",
    "range_statistics",
    "targets_of",
]
