"""Heads of classes, of rows and of tokens: trained as by transformers' own forward and loss."""

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from megatrain import InputError, Placement
from megatrain.data.dataset import scored
from megatrain.errors import Unsupported
from megatrain.loss import CROSS_ENTROPY, ClassHead, MultiLabel
from megatrain.model.build import with_head
from tests.families.plain import train_in_place
from tests.families.tiny import tiny_config
from tests.parity.cases import (
    begun_adapter,
    make_engine,
    masters,
    noisy,
    parameters,
    relative_error,
    resumes,
)
from tests.sweeps import few

PAD, K = 0, 4
MICRO = [(3, 9), (1, 6), (2, 7)]
KINDS = ("one label", "several labels", "tokens")
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "mixtral")


def classifier(kind, family="llama", labels=K):
    auto = AutoModelForTokenClassification if kind == "tokens" else None
    config = tiny_config(family)
    config.num_labels, config.pad_token_id, config.classifier_dropout = labels, PAD, 0.0
    config.problem_type = "multi_label_classification" if kind == "several labels" else None
    torch.manual_seed(0)
    return noisy((auto or AutoModelForSequenceClassification).from_config(config))


def steps(kind):
    """Three steps; of each micro-batch transformers' inputs, with its labels, and ours."""
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(3):
        step = []
        for rows, tokens in MICRO:
            ids = torch.randint(10, 40, (rows, tokens), generator=generator)
            lengths = torch.randint(3, tokens + 1, (rows, 1), generator=generator)
            mask = (torch.arange(tokens) < lengths).long()
            ids = ids.where(mask == 1, PAD)
            plain = {"input_ids": ids, "attention_mask": mask}
            labels = torch.randint(K, (rows, tokens), generator=generator)
            if kind == "tokens":
                labels = labels.where((mask == 1) & (labels.roll(1) > 0), -100)
                step.append((plain | {"labels": labels}, plain | {"labels": labels}))
                continue
            ours = plain | {"labels": scored(ids, mask, PAD)}
            if kind == "one label":
                ours["labels"] = ours["labels"].where(ours["labels"] < 0, labels[:, :1])
                step.append((plain | {"labels": labels[:, 0]}, ours))
                continue
            truths = torch.randint(2, (rows, K), generator=generator).float()
            shape = (rows, tokens, K)
            ours["classes"] = torch.arange(K).expand(shape).contiguous()
            ours["truths"] = truths[:, None].expand(shape).contiguous()
            step.append((plain | {"labels": truths}, ours))
        made.append(step)
    return made


def own_shares(model, step):
    """The losses of the model's own forward, each micro-batch weighed by its labels."""
    counts = [int((ours["labels"] != -100).sum()) for _, ours in step]
    for (inputs, _), count in zip(step, counts, strict=True):
        yield model(**inputs).loss * (count / sum(counts))


def engine_of(model, **options):
    return make_engine(model, placement=Placement(head_tokens=5), **options)


CASES = {f"{kind}, {family}": (kind, family) for family in FAMILIES for kind in KINDS}


@pytest.mark.parametrize("case", few(CASES, 0, 1, 2))
def test_three_steps_are_plain_ones_and_the_export_is_transformers_own(case, tmp_path):
    kind, family = CASES[case]
    model, made = classifier(kind, family), steps(kind)
    before, loss = parameters(model), MultiLabel() if kind == "several labels" else CROSS_ENTROPY
    with engine_of(model) as engine:
        losses = [engine.step([ours for _, ours in step], loss).loss for step in made]
        plain = train_in_place(model, made, parts=own_shares)
        assert losses == pytest.approx(plain.losses, rel=1e-6)
        assert relative_error(masters(engine), plain.parameters, before) < 2e-5
        engine.save_pretrained(tmp_path / "out")
        inputs, ours = made[0][0]
        model.eval()
        if kind != "several labels":
            _, accuracy = engine.score([ours])
            logits, labels = model(**inputs).logits, inputs["labels"]
            right = (logits.argmax(-1) == labels)[labels != -100]
            assert accuracy == pytest.approx(right.float().mean().item())
    again = type(model).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("kind", few(["one label", "tokens"]))
def test_an_adapter_trains_its_head_whole_as_peft_has_it(kind, tmp_path):
    model, made = classifier(kind), steps(kind)
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")
    task = "TOKEN_CLS" if kind == "tokens" else "SEQ_CLS"
    adapted = begun_adapter(model, task, tmp_path / "begun")
    with engine_of(tmp_path / "begun") as engine:
        losses = [engine.step([ours for _, ours in step]).loss for step in made]
        wanted = train_in_place(adapted, made, parts=own_shares).losses
        assert losses == pytest.approx(wanted, rel=1e-6)
        engine.save_pretrained(tmp_path / "out")
        resumes(engine, tmp_path / "saved", [[ours for _, ours in made[0]]])
    base = type(model).from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    inputs = made[0][0][0]
    with torch.no_grad():
        wanted = adapted.eval()(**inputs).logits
        torch.testing.assert_close(loaded(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_a_head_of_another_problem_is_not_trained_by_cross_entropy(problem):
    model, [step, *_] = classifier("one label"), steps("one label")
    model.config.problem_type = problem
    with engine_of(model) as engine, pytest.raises(InputError, match="regression has no loss"):
        engine.step([ours for _, ours in step])


def test_a_head_without_names_gets_the_problem_that_is_asked_for():
    """Else the exported model is read as one of a single label."""
    names = tuple(f"LABEL_{number}" for number in range(K))
    config = classifier("one label").config
    config.architectures = ["LlamaForSequenceClassification"]
    several = "multi_label_classification"
    assert with_head(config, ClassHead(names, problem_type=several)).problem_type == several
    assert with_head(config, ClassHead(names)) is config


def test_a_row_that_is_not_scored_at_its_last_token_is_refused():
    """A head that reads the first token, as encoders have it, would be trained at another."""
    config = tiny_config("camembert")
    model = transformers.CamembertForSequenceClassification(config)
    with pytest.raises(Unsupported, match="does not score a row by its last token"):
        engine_of(model)
