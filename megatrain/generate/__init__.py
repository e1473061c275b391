"""Texts and replies from an engine, also one in training."""

from megatrain.generate.sampling import Sampling
from megatrain.generate.texts import continued, generate, stop_ids
