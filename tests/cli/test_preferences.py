"""Runs with losses of replies: preferences move, a run goes on exactly, references are kept."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatrain.config.learning import LossSection
from megatrain.config.load import validate
from megatrain.forecast.workload import Workload
from megatrain.loss import DPO, Reward
from megatrain.train.second_model import References
from tests.cli.cases import SENTENCES, records, sets
from tests.parity.cases import llama, make_batches, make_engine
from tests.unit.data_cases import talk, write_jsonl

LANGUAGES = ("yaml", "python")
GOOD, BAD = "on the mat", "a dog ran to the"


def pair(number):
    """In turn as messages with the prompt in both, with a prompt apart, and as texts."""
    question = f"{SENTENCES[number % 3]} {number}"
    if number % 2:
        return {"chosen": talk(question, GOOD), "rejected": talk(question, BAD)}
    asked, chosen = talk(question, GOOD)[:1], talk(question, GOOD)[1:]
    return {"prompt": asked, "chosen": chosen, "rejected": talk(question, BAD)[1:]}


def test_smoothing_of_preferences_is_dpo_s_own():
    section = LossSection(name="dpo", loss_type="robust", label_smoothing=0.2)
    assert section.loss() == DPO(loss_type="robust", label_smoothing=0.2)


@pytest.fixture
def preference_file(file_of_rows):
    def made(rows, **loss):
        return file_of_rows(rows, loss, 0.003, steps=6, batch_size=4, eval_every=3)

    return made


def test_a_run_moves_preferences_and_goes_on_exactly(megatrain, preference_file):
    file = preference_file([pair(number) for number in range(20)], name="dpo")

    whole, _ = megatrain.resumed(file, 6, 2)
    steps, evaluated = records(whole, "loss"), records(whole, "eval_loss")
    # Before its first update the model is the reference.
    assert steps[0]["loss"] == pytest.approx(math.log(2))
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert evaluated[-1]["eval_rewards/margins"] > 0.1
    assert evaluated[-1]["eval_loss"] < steps[0]["loss"] - 0.02
    assert evaluated[-1]["eval_rewards/accuracies"] == 1.0


def test_a_reward_model_is_made_of_a_language_model(megatrain, preference_file, tmp_path):
    rows = [pair(number) for number in range(20)]
    file = preference_file(rows, name="reward", center_rewards_coefficient=0.01)
    megatrain.done("train", file)
    assert not (tmp_path / "run" / "references.json").exists()
    evaluated = records(tmp_path / "run", "eval_loss")
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert evaluated[-1]["eval_rewards/accuracies"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    talks = [tokenizer.apply_chat_template(talk("a cat sat", each), return_tensors="pt",
                                           return_dict=True) for each in (GOOD, BAD)]  # fmt: skip
    good, bad = (model(input_ids=each["input_ids"]).logits.item() for each in talks)
    assert good > bad
    megatrain.done("plan", file, "--gpu", "4090")
    megatrain.refused("scores of rows", "generate", tmp_path / "run", "--prompt", "a cat")


def test_margins_of_the_data_are_taken_off(megatrain, preference_file, tmp_path):
    """Evaluated before anything is learnt, by the rewards that the run without margins logs."""
    margins = {"one": [40, 50], "other": [70, 90, 95]}
    rows = [pair(number) | {"margin": number} for number in range(20)]
    file = preference_file(rows, name="reward", margin=True)
    paths = {}
    for name, each in margins.items():
        paths[name] = str(tmp_path / f"{name}.jsonl")
        told = [pair(20 + number) | {"margin": number} for number in each]
        write_jsonl(Path(paths[name]), told)
    still = sets(training__steps=1, training__eval_every=1, optimizer__lr=1e-12)
    still += sets(data__eval_fraction=0.0, data__eval_path=paths)
    logs = []
    for margin in (True, False):
        how = sets(output__folder=str(tmp_path / str(margin)), loss__margin=margin)
        megatrain.done("train", file, *still, *how)
        logs.append(records(tmp_path / str(margin))[-1])
    [with_margins, without] = logs
    for name, each in margins.items():
        gap = without[f"eval_{name}_rewards/margins"]
        assert with_margins[f"eval_{name}_rewards/margins"] == pytest.approx(gap)
        # -log sigmoid(gap - margin) is margin - gap where that is large
        wanted = sum(each) / len(each) - gap
        assert with_margins[f"eval_{name}_loss"] == pytest.approx(wanted, rel=1e-6)
        assert without[f"eval_{name}_loss"] < 2


def test_a_run_goes_on_with_its_references_alone(megatrain, preference_file, tmp_path):
    file = preference_file([pair(number) for number in range(20)], name="dpo")
    megatrain.done("train", file, *sets(training__steps=1))
    references = tmp_path / "run" / "references.json"
    kept, more = references.read_text(), (*sets(training__steps=2), "--resume")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(pair(7)) + "\n")
    changed = sets(data__eval_path=str(other), data__eval_fraction=0.0)
    References({}, {}).write(tmp_path / "run")
    other_data = references.read_text(), "the reference's log-probabilities are not of"
    for spoilt, said in (other_data, ("", "what the run keeps of its reference cannot be read")):
        references.write_text(spoilt)
        megatrain.refused(f"references.json: {said}", "train", file, *more)
    references.write_text(kept)
    assert megatrain("train", file, *more, *changed).exit_code == 2
    megatrain.done("train", file, *more)
    assert references.read_text() == kept


def test_what_the_page_shows_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    shown = {
        language: re.search(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in LANGUAGES
    }
    config = validate(yaml.safe_load(shown["yaml"][1]), "docs/losses.md")
    workload = Workload.of_run(config)
    assert workload.loss == DPO() and workload.tokens_per_step == 2 * 64 * 2048
    [[micro, *_]] = make_batches(1, [(4, 9), (2, 7)])
    engine = make_engine(llama())
    names = {"engine": engine, "ids": micro["input_ids"], "labels": micro["labels"]}
    exec(shown["python"][1], names)
    assert names["result"].loss == pytest.approx(math.log(2))
    distilled = page.split("```python\n")[2].split("```")[0]
    exec(distilled, names | {"teacher": make_engine(llama(tie_word_embeddings=True))})
    blocks = [block.split("```")[0] for block in page.split("```yaml\n")[1:]]
    for tree in map(yaml.safe_load, blocks):
        assert "loss" not in tree or validate(tree, "docs/losses.md")
    assert LossSection(name="reward").loss() == Reward()
    for key in re.search(r"\n\| `reward` \|(.*?)\|", page)[1].split("`")[1::2]:
        key, _, value = key.partition(": ")
        assert not value or str(getattr(Reward(), key)).rstrip(".0") == value.rstrip(".0")
