"""Replies in pairs, and their log-probabilities; their losses are in `test_trl.py`."""

import pytest
import torch

from megatrain import Engine, InputError, Placement
from megatrain.loss import DPO
from tests.parity.cases import llama, make_batches, make_engine

PLACEMENTS = {"chunks": Placement(head_tokens=5), "a chunk": Placement()}
WIDE = 1000


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


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_log_probabilities_are_those_of_the_labels(placement):
    model, [step] = llama(vocab_size=WIDE), make_batches(1)
    found = make_engine(model, placement=placement).logprobs(step)
    for each, micro in zip(found, step, strict=True):
        labels = micro["labels"]
        with torch.no_grad():
            every = model(input_ids=micro["input_ids"]).logits.log_softmax(-1)
        wanted = torch.zeros(labels.shape)
        wanted[:, 1:] = every[:, :-1].gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        wanted = wanted.masked_fill(labels == -100, 0)
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)
        assert each.dtype == torch.float32


def test_replies_that_are_none_are_refused():
    engine: Engine = make_engine(llama())
    loss = DPO()  # numbers that begin anew
    with pytest.raises(InputError, match="pair 0 has a reply in several rows of this step"):
        engine.step([*replies(loss), *replies(loss)], loss)
