"""A run that cannot be prepared closes all engines that it has opened."""

import json

import pytest
import yaml

from megatrain import Engine
from megatrain.config import load
from megatrain.errors import InputError
from megatrain.train import second_model, setup
from tests.cli.cases import SENTENCES


@pytest.fixture
def engines(monkeypatch):
    """The engines that are made, each with whether it has been closed."""
    made, init, close = {}, Engine.__init__, Engine.close

    def noted(engine, *arguments, **options):
        init(engine, *arguments, **options)
        made[engine] = False

    def closed(engine):
        close(engine)
        made[engine] = True

    monkeypatch.setattr(Engine, "__init__", noted)
    monkeypatch.setattr(Engine, "close", closed)
    return made


def fails(*_, **__):
    raise InputError("broken")


PAIRS = {"chosen": "the cat sat", "rejected": "a dog ran"}
DPO, GRPO = {"name": "dpo"}, {"name": "grpo", "beta": 0.1, "num_generations": 2}


@pytest.mark.parametrize(
    ("loss", "row", "broken", "number"),
    [
        (DPO, PAIRS, (second_model, "logprobs"), 1),
        (GRPO, {"prompt": "the cat"}, (setup, "Rollouts"), 2),
    ],
    ids=["pass of the reference", "rollouts"],
)
def test_what_fails_leaves_no_engine_open(
    loss, row, broken, number, run_file, base, tmp_path, monkeypatch, engines
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def none(completions, **_): return [0.0]\n")
    rows = [row | {"prompt": f"{SENTENCES[each % 3]} {each}"} for each in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tree = yaml.safe_load(run_file.read_text())
    tree["model"], tree["loss"] = {"path": str(base)}, loss
    tree["data"] = {"path": str(tmp_path / "rows.jsonl"), "sequence_length": 48}
    tree["training"].pop("eval_every")
    if loss["name"] == "grpo":
        tree["loss"] |= {"max_completion_length": 8}
        tree["rollout"] = {"rewards": ["rewards.py:none"]}
    run_file.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(*broken, fails)
    with pytest.raises(InputError, match="broken"):
        setup.prepare(load(run_file))
    assert list(engines.values()) == [True] * number
