"""Losses against those of TRL's own trainers: what they compute, and its gradients."""

import copy

import pytest
import torch
from transformers import AutoTokenizer

from megatrain import Placement
from megatrain.loss import DPO
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error, slopes
from tests.sweeps import few

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TEXT = "a cat sat on the mat and a dog ran to the sea where it swam for an hour"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def rows():
    said = [" ".join(WORDS[at % 7 : 3 + 2 * at % 9 + at % 7]) for at in range(12)]
    return [
        {"prompt": said[at], "chosen": " " + said[at + 1], "rejected": " " + said[at + 2]}
        for at in range(0, 12, 3)
    ]


def trainer_of(loss, models, tokenizer, folder):
    """TRL's trainer of copies of these models."""
    settings = vars(loss) | {"loss_type": [loss.loss_type]}
    args = trl.DPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=4,
        gradient_checkpointing=False, bf16=False, max_length=64, disable_tqdm=True, **settings,
    )  # fmt: skip
    return trl.DPOTrainer(
        *map(copy.deepcopy, models),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows()),
        processing_class=tokenizer,
    )


def plain_logprobs(model, batch, labels):
    """The log-probability of each label in its place, 0 elsewhere."""
    with torch.no_grad():
        logits = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found = logits[:, :-1].log_softmax(-1)
    picked = found.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.cat([torch.zeros(len(labels), 1), picked * (labels[:, 1:] != -100)], 1)


DPOS = [
    DPO(0.5, loss_type="ipo"),
    DPO(0.3),
    DPO(2.0, loss_type="sigmoid_norm"),
    DPO(0.05, 0.2, "robust"),
    DPO(0.05, loss_type="hinge"),
]


@pytest.mark.parametrize("loss", few(DPOS), ids=str)
def test_dpo(tokenizer, tmp_path, loss):
    sizes = {"vocab_size": 320, "pad_token_id": tokenizer.pad_token_id}
    model, reference = llama(**sizes), llama(**sizes, tie_word_embeddings=True)
    trainer = trainer_of(loss, (model, reference), tokenizer, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    micro = {name: batch[name].clone() for name in ("input_ids", "attention_mask")}
    micro["labels"] = micro["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    micro["reference_logp"] = plain_logprobs(reference, micro, micro["labels"])
    wanted = trainer.compute_loss(trainer.model.train(), batch)
    wanted.backward()
    count, tokens = micro["labels"].shape
    numbers = torch.arange(count)[:, None].expand(count, tokens)
    micro |= {"pair": (numbers % (count // 2)).float(), "chosen": (numbers < count // 2).float()}
    step = [{n: value[at : at + 3] for n, value in micro.items()} for at in range(0, count, 3)]
    engine = make_engine(model, clip=1e9, placement=Placement(head_tokens=5))
    value, said = pytest.approx(wanted.item(), rel=1e-6, abs=1e-7), trainer._metrics["train"]
    assert engine.evaluate(step, loss) == value
    result = engine.step(step, loss)
    assert result.loss == value
    assert relative_error(gradients(engine), slopes(trainer.model)) < 3e-6
    for name, measure in result.measures.items():  # of logarithms in fp32 that all but cancel
        assert measure == pytest.approx(said[name][0], rel=1e-5, abs=5e-6), name


def test_smoothed_dpo_takes_a_share_of_the_pairs_for_the_other_way_round():
    """TRL has no such loss any more."""
    rows = torch.arange(4)[:, None].expand(4, 9)
    [[micro]] = make_batches(1, [(4, 9)])
    numbers = {"pair": (rows // 2).float(), "chosen": (rows % 2).float()}
    pairs = [micro | numbers | {"reference_logp": torch.zeros(4, 9)}]
    turned = [pairs[0] | {"chosen": 1 - numbers["chosen"]}]
    found = []
    for loss, step in ((DPO(0.3, 0.1), pairs), (DPO(0.3), pairs), (DPO(0.3), turned)):
        engine = make_engine(llama(), clip=1e9)
        found.append((engine.step(step, loss).loss, gradients(engine)))
    (smoothed, slopes), (right, of_right), (wrong, of_wrong) = found
    assert smoothed == pytest.approx(0.9 * right + 0.1 * wrong, rel=1e-6)
    wanted = {name: 0.9 * each + 0.1 * of_wrong[name] for name, each in of_right.items()}
    assert relative_error(slopes, wanted) < 3e-6
