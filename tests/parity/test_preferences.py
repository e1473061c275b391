"""Replies in pairs; their losses are in `test_trl.py`, log-probabilities in `test_policy.py`."""

import pytest
import torch

from megatrain import Engine, InputError
from megatrain.loss import DPO
from tests.parity.cases import llama, make_batches, make_engine


def replies(loss):
    """Six replies in uneven micro-batches: chosen and rejected in turn."""
    [step] = make_batches(1)
    generator, number = torch.Generator().manual_seed(5), 0
    for micro in step:
        ids = micro["input_ids"]
        rows, width = ids.shape
        prompt = torch.arange(width) < 2
        numbers = torch.arange(number, number + rows)
        number += rows
        chosen = (numbers < 3)[:, None].expand(ids.shape)
        labels = micro["labels"].masked_fill(prompt, -100)
        micro["labels"] = labels
        micro["chosen"], micro["pair"] = chosen.float(), (numbers % 3)[:, None].expand(ids.shape)
        micro["pair"] = micro["pair"].float()
        micro["reference_logp"] = -7 + torch.randn(ids.shape, generator=generator)
    return [{n: m[n] for n in ("input_ids", "labels", *loss.inputs)} for m in step]


def test_replies_that_are_none_are_refused():
    engine: Engine = make_engine(llama())
    loss = DPO()  # numbers that begin anew
    with pytest.raises(InputError, match="pair 0 has a reply in several rows of this step"):
        engine.step([*replies(loss), *replies(loss)], loss)
