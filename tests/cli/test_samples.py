"""Samples while a run trains, and which parameters it trains."""

import pytest
from safetensors.torch import load_file

from megatrain import config
from megatrain.errors import InputError
from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import sets
from tests.cli.test_mistakes import assert_refused

SAMPLES = {"training__samples": {"prompts": ["the cat", "a dog ran"], "max_new_tokens": 3}}


def records(run):
    return list(read_metrics(run / "metrics.jsonl"))


def test_each_evaluation_has_samples_and_nothing_else_changes(megatrain, run_file):
    run, plain = run_file.parent / "run", run_file.parent / "plain"
    result = megatrain.done("train", run_file, *sets(**SAMPLES))
    megatrain.done("train", run_file, *sets(output__folder=str(plain)))
    made = [record["samples"] for record in records(run) if "samples" in record]
    assert [[each["prompt"] for each in some] for some in made] == [["the cat", "a dog ran"]] * 2
    assert all(each["text"] for each in made[-1])
    shown = " ".join(made[-1][0]["text"].split())
    assert f"the cat -> {shown[:100]}" in result.stdout
    losses = [[r.get("loss", r.get("eval_loss")) for r in records(each)] for each in (run, plain)]
    assert losses[0] == losses[1]
    ours, others = (load_file(each / "model" / "model.safetensors") for each in (run, plain))
    assert all(ours[name].equal(others[name]) for name in ours)


def test_prompts_that_cannot_be_used_are_refused_first(megatrain, run_file):
    result = megatrain("train", run_file, *sets(training__samples={"prompts": [""]}))
    assert_refused(result, "training.samples: prompt 1: holds no token")
    assert not (run_file.parent / "run").exists()
    for prompts, told in (
        (
            [[{"role": "user", "content": "a"}], {"role": "user"}],
            "prompts: should be a valid string, got",
        ),
        (["the cat"], "prompt 1: 2 tokens and max_new_tokens of 64 are more than the model's"),
    ):
        result = megatrain("train", run_file, *sets(training__samples={"prompts": prompts}))
        assert_refused(result, told)
    with pytest.raises(InputError, match="training.samples needs evaluations"):
        config.load(run_file, ['training.samples={prompts: ["a"]}', "data.eval_fraction=0"])


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"model__freeze": ["lm_hed"]}, "freeze: 'lm_hed' matches the name of no parameter; there"),
        ({"model__freeze": ["("]}, "model.freeze: '(' is not a regular expression"),
        ({"model__train_only": []}, "model.train_only"),
        ({"model__freeze": ["."]}, "every parameter is frozen: there is nothing to train"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(megatrain, run_file, choice, told):
    assert_refused(megatrain("train", run_file, *sets(**choice)), told)


def test_a_resumed_run_draws_the_noise_of_one_that_was_not_interrupted(megatrain, run_file):
    folder, found = run_file.parent, []
    even = {"training__neftune_alpha": 10.0, "schedule__name": "constant_with_warmup"}
    for name, lengths in (("whole", [4]), ("run", [2, 4])):
        for steps in lengths:
            how = ("--resume",) if steps != lengths[0] else ()
            changes = sets(**even, output__folder=str(folder / name), training__steps=steps)
            megatrain.done("train", run_file, *how, *changes)
        found.append([r["loss"] for r in records(folder / name) if "loss" in r])
    assert found[0] == found[1]
    quiet = sets(**even | {"training__neftune_alpha": None}, output__folder=str(folder / "quiet"))
    megatrain.done("train", run_file, *quiet)
    assert records(folder / "quiet")[0]["loss"] != found[0][0]
