"""Losses against those of TRL's own trainers: what they compute, and its gradients."""

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatrain import Placement
from megatrain.loss import DPO
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error, slopes
from tests.sweeps import few

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TEXT = "a cat sat on the mat and a dog ran to the sea where it swam for an hour"
WORDS = TEXT.split()
VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def rows(count=4):
    said = [" ".join(WORDS[at % 7 : 3 + 2 * at % 9 + at % 7]) for at in range(3 * count)]
    return [
        {"prompt": said[3 * i], "chosen": " " + said[3 * i + 1], "rejected": " " + said[3 * i + 2]}
        for i in range(count)
    ]


def trainer_of(kind, models, data, tokenizer, folder, **more):
    """TRL's trainer called `kind`, of copies of these models."""
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=4,
        gradient_checkpointing=False, bf16=False, max_length=64, disable_tqdm=True, **more,
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        *map(copied, models),
        args=args,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
    )


def computed(trainer):
    """A batch of a trainer, its loss, and the gradients."""
    batch = next(iter(trainer.get_train_dataloader()))
    given = {name: v.clone() if isinstance(v, Tensor) else v for name, v in batch.items()}
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return given, loss.item(), slopes(trainer.model)


def agree(model, step, loss, wanted, said):
    """Loss and gradients are the wanted ones, and measures those that a trainer has `said`."""
    value, grads = wanted
    engine = make_engine(model, clip=1e9, placement=Placement(head_tokens=5))
    assert engine.evaluate(step, loss) == pytest.approx(value, rel=1e-6, abs=1e-7)
    result = engine.step(step, loss)
    assert result.loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert relative_error(gradients(engine), grads) < 3e-6
    for name, measure in result.measures.items():  # of logarithms in fp32 that all but cancel
        assert measure == pytest.approx(said[name][0], rel=1e-5, abs=5e-6), name
    return result.measures


def in_parts(rows, cut):
    parts = {name: tensor.split(cut) for name, tensor in rows.items()}
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def plain_logprobs(model, batch, labels):
    """The log-probability of each label in its place, 0 elsewhere."""
    with torch.no_grad():
        logits = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found = logits[:, :-1].log_softmax(-1)
    picked = found.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.cat([torch.zeros(len(labels), 1), picked * (labels[:, 1:] != -100)], 1)


def of_pairs(batch):
    ids = batch["input_ids"]
    at = torch.arange(len(ids))[:, None].expand(ids.shape)
    half = len(ids) // 2
    both = {"pair": (at % half).float(), "chosen": (at < half).float()}
    return {"input_ids": ids, "attention_mask": batch["attention_mask"], **both}


def both(tokenizer):
    """A model and its reference."""
    sizes = {"vocab_size": VOCAB, "pad_token_id": tokenizer.pad_token_id}
    return llama(**sizes), llama(**sizes, tie_word_embeddings=True)


def copied(model):
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made


DPOS = [
    DPO(0.5, loss_type="ipo"),
    DPO(0.3),
    DPO(2.0, loss_type="sigmoid_norm"),
    DPO(0.05, 0.2, "robust"),
    DPO(0.05, loss_type="hinge"),
]


@pytest.mark.parametrize("loss", few(DPOS), ids=str)
def test_dpo(tokenizer, tmp_path, loss):
    models, settings = both(tokenizer), vars(loss) | {"loss_type": [loss.loss_type]}
    trainer = trainer_of("DPO", models, rows(), tokenizer, tmp_path, **settings)
    batch, *wanted = computed(trainer)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    micro = of_pairs(batch) | {"labels": labels}
    micro["reference_logp"] = plain_logprobs(models[1], batch, labels)
    agree(models[0], in_parts(micro, 3), loss, wanted, trainer._metrics["train"])


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
