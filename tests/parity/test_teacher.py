"""What a teacher says of labels: plain torch's top tokens."""

import pytest
import torch

from megatrain import InputError, Placement
from tests.parity.cases import llama, make_batches, make_engine

WIDE = 1000


@pytest.mark.parametrize("top_k", [1, 40, WIDE])
def test_top_log_probs_are_those_of_plain_torch(top_k):
    model, [step] = llama(vocab_size=WIDE), make_batches(1)
    with make_engine(model, placement=Placement(head_tokens=5)) as engine:
        found = engine.top_logprobs(step, top_k)
    for micro, (ids, log_probs) in zip(step, found, strict=True):
        with torch.no_grad():
            logits = model.eval()(micro["input_ids"]).logits[:, :-1]
        there = micro["labels"][:, 1:] != -100
        assert ids.dtype == torch.int64 and ids.shape == (*micro["labels"].shape, top_k)
        assert not ids[:, 1:][~there].any() and not log_probs[:, 1:][~there].any()
        assert not ids[:, 0].any() and not log_probs[:, 0].any()
        wanted = logits.log_softmax(-1)
        torch.testing.assert_close(
            log_probs[:, 1:][there], wanted.topk(top_k).values[there], rtol=0, atol=2e-6
        )
        named = wanted.gather(2, ids[:, 1:])[there]
        torch.testing.assert_close(log_probs[:, 1:][there], named, rtol=0, atol=2e-6)
        assert all(len(set(each)) == top_k for each in ids[:, 1:][there].tolist())


@pytest.mark.parametrize(("top_k", "message"), [(WIDE + 1, "has 1000 tokens"), (0, "at least 1")])
def test_other_counts_than_the_vocabulary_has_are_refused(top_k, message):
    [step] = make_batches(1)
    with make_engine(llama(vocab_size=WIDE)) as engine, pytest.raises(InputError, match=message):
        engine.top_logprobs(step, top_k)
