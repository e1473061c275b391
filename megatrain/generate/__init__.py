"""Generates texts and replies with an engine, also with one in training."""

from megatrain.generate.sampling import Sampling
from megatrain.generate.texts import continued, generate, stop_ids
