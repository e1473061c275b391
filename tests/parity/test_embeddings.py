"""Embeddings by a contrastive loss: trained as sentence-transformers' formula in plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModel

from megatrain import InputError
from megatrain.loss import CROSS_ENTROPY, DPO, Contrastive, Reward
from tests.families.plain import train_in_place
from tests.families.tiny import tiny_config
from tests.parity.cases import (
    begun_adapter,
    llama,
    make_engine,
    masters,
    noisy,
    parameters,
    relative_error,
    resumes,
)
from tests.parity.ranks import assert_as_one, run_ranks
from tests.parity.test_classes import engine_of
from tests.sweeps import few, swept

PAIRS, PAD = 4, 0
LOSSES = {
    "last token": Contrastive(),
    "mean, hard negatives": Contrastive(pooling="mean", negatives=2),
    "symmetric, hard negatives": Contrastive(10.0, symmetric=True, negatives=1),
}


def base_model(family="llama"):
    config = tiny_config(family)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    return noisy(AutoModel.from_config(config))


def texts(loss, seed):
    """All texts of a step, in any order, padded."""
    generator = torch.Generator().manual_seed(seed)
    count, tokens = PAIRS * loss.lines, 9
    ids = torch.randint(10, 40, (count, tokens), generator=generator)
    lengths = torch.randint(3, tokens + 1, (count, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    pooled = mask if loss.pooling == "mean" else torch.arange(tokens) == lengths - 1
    order = torch.randperm(count, generator=generator)[:, None].expand(ids.shape)
    return {
        "input_ids": ids.where(mask, PAD),
        "attention_mask": mask.long(),
        "labels": torch.zeros_like(ids).where(pooled, -100),
        "pair": (order % PAIRS).float(),
        "text": (order // PAIRS).float(),
    }


def steps(loss, parts=1):
    """Three steps, their texts in so many micro-batches."""
    made = [texts(loss, seed) for seed in range(3)]
    split = [{name: each.chunk(parts) for name, each in step.items()} for step in made]
    return [[{n: each[i] for n, each in step.items()} for i in range(parts)] for step in split]


def embedded(loss, model, given):
    """The embedding of each row, as sentence-transformers pools it."""
    mask = given["attention_mask"]
    hidden = model(input_ids=given["input_ids"], attention_mask=mask)[0]
    if loss.pooling == "mean":
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return hidden[torch.arange(len(mask)), mask.sum(1) - 1]


def similarities(loss, model, given):
    order = (given["text"] * PAIRS + given["pair"])[:, 0].argsort()
    anchors, *others = F.normalize(embedded(loss, model, given)[order], dim=1).split(PAIRS)
    return anchors @ torch.cat(others).T * loss.scale


def plain_loss(loss, model, step):
    """MultipleNegativesRankingLoss, as sentence-transformers computes it of whole batches."""
    [given], right = step, torch.arange(PAIRS)
    scores = similarities(loss, model, given)
    value = F.cross_entropy(scores, right)
    if loss.symmetric:
        value = (value + F.cross_entropy(scores[:, :PAIRS].T, right)) / 2
    yield value


def test_embeddings_that_are_all_alike_tell_no_positive():
    pair, text = torch.tensor([0.0, 0, 1, 1]), torch.tensor([0.0, 1, 0, 1])
    measures = Contrastive().measures(torch.ones(4, 3), torch.zeros(4).long(), pair, text)
    assert measures["accuracy"] == 0


@swept(together=1, parts={"one micro-batch": 1, "several": 3}, loss=LOSSES)
def test_three_steps_are_plain_ones(loss, parts, tmp_path):
    model, made = base_model(), steps(loss, parts)
    before, whole = parameters(model), steps(loss)
    with engine_of(model) as engine:
        value, given = next(plain_loss(loss, model, whole[0])).item(), whole[0][0]
        assert engine.evaluate(made[0], loss) == pytest.approx(value, rel=1e-6)
        bare = {n: given[n] for n in ("input_ids", "attention_mask", "labels")}
        torch.testing.assert_close(engine.embeddings([bare])[0], embedded(loss, model, given))
        nearest = similarities(loss, model, given).argmax(1)
        results = [engine.step(step, loss) for step in made]
        right = (nearest == torch.arange(PAIRS)).double().mean().item()
        assert results[0].measures["accuracy"] == pytest.approx(right)
        plain = train_in_place(model, whole, parts=partial(plain_loss, loss))
        assert [result.loss for result in results] == pytest.approx(plain.losses, rel=1e-6)
        assert relative_error(masters(engine), plain.parameters, before) < 2e-5
        engine.save_pretrained(tmp_path / "out")
        resumes(engine, tmp_path / "saved", made, loss)
    again = AutoModel.from_pretrained(tmp_path / "out").eval()
    ids = whole[0][0]["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(again(ids)[0], model.eval()(ids)[0])


@pytest.mark.parametrize("family", few(["bert", "mixtral", "gpt2", "gemma2"], 0))
def test_families_are_plain_ones(family):
    loss = LOSSES["mean, hard negatives"]
    model, made = base_model(family), steps(loss, 2)
    with engine_of(model) as engine:
        losses = [engine.step(step, loss).loss for step in made]
        plain = train_in_place(model, steps(loss), parts=partial(plain_loss, loss))
    assert losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_language_model_loses_its_head_and_an_adapter_is_pefts(tmp_path):
    loss = LOSSES["mean, hard negatives"]
    llama().save_pretrained(tmp_path / "base")
    model = AutoModel.from_pretrained(tmp_path / "base")
    adapted = begun_adapter(model, "FEATURE_EXTRACTION", tmp_path / "begun")
    with engine_of(tmp_path / "begun") as engine:
        losses = [engine.step(step, loss).loss for step in steps(loss, 2)]
        plain = train_in_place(adapted, steps(loss), parts=partial(plain_loss, loss))
        assert losses == pytest.approx(plain.losses, rel=1e-6)
        engine.save_pretrained(tmp_path / "out")
        resumes(engine, tmp_path / "saved", steps(loss, 2), loss)
    loaded = PeftModel.from_pretrained(
        AutoModel.from_pretrained(tmp_path / "base"), tmp_path / "out"
    )
    ids = steps(loss)[0][0]["input_ids"]
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids)[0]
        torch.testing.assert_close(loaded.eval()(input_ids=ids)[0], wanted, rtol=1e-5, atol=1e-5)


def test_ranks_have_the_texts_of_all_as_negatives(tmp_path):
    loss = LOSSES["symmetric, hard negatives"]

    def work(group):
        rank = 0 if group is None else torch.distributed.get_rank(group)
        made = steps(loss, 3)
        parts = made if group is None else [step[rank : rank + 1 + rank] for step in made]
        with engine_of(base_model(), group=group) as engine:
            losses = [engine.step(step, loss).loss for step in parts]
            return {"all": {"losses": torch.tensor(losses)} | masters(engine)}

    assert_as_one(work(None), run_ranks(2, tmp_path / "ranks", work))


MISTAKES = {
    "one row of text 0": lambda m: m["text"].add_(1.0),
    "one row of text 0 and": lambda m: m["pair"].clamp_(max=2.0),
    "whole numbers": lambda m: m["text"].sub_(1.0),
}


@pytest.mark.parametrize("reason", MISTAKES)
def test_texts_of_no_whole_pair_are_refused(reason):
    loss = Contrastive(pooling="mean")
    [[micro], *_] = made = steps(loss)
    micro |= {name: micro[name].contiguous() for name in ("pair", "text")}
    MISTAKES[reason](micro)
    with pytest.raises(InputError, match=reason):
        engine_of(base_model()).step(made[0], loss)


def test_losses_and_models_that_do_not_fit_are_refused():
    engine, loss = engine_of(base_model()), Contrastive()
    [step, *_] = steps(loss)
    bare = [{n: step[0][n] for n in ("input_ids", "labels")}]
    for asked, rows in ((CROSS_ENTROPY, bare), (Reward(), step), (DPO(), step)):
        with pytest.raises(InputError, match="is not for a LlamaModel"):
            engine.evaluate(rows, asked)
    with pytest.raises(InputError, match="no texts"), engine.whole_model():
        pass
    with pytest.raises(InputError, match="Contrastive is not for a LlamaForCausalLM"):
        make_engine(llama()).step(step, loss)
    for wrong in ({"scale": 0}, {"negatives": -1}, {"pooling": "max"}):
        with pytest.raises(InputError, match=f"Contrastive's {min(wrong)} is"):
            Contrastive(**wrong)
