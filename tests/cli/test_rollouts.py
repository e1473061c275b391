"""Runs that learn from replies of their own: rewards rise, a run goes on exactly, mistakes."""

import asyncio
import json
import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatrain as package
from megatrain.config import RolloutSection, load
from megatrain.data import load_tokenizer
from megatrain.data.prompts import prompt_ids
from megatrain.errors import RunFailed
from megatrain.train.rollouts import Rewards
from tests.cli.cases import MISTAKES, SENTENCES, change_run, records, sets, tiny_llama
from tests.cli.test_ranks import assert_same_run, one_rank, run_of, two_then_three
from tests.parity.ranks import run_ranks
from tests.refusals import table
from tests.structure.source_tree import ROOT
from tests.sweeps import few
from tests.unit.data_cases import write_jsonl

PLANTED = table(__file__, "planted.yaml")


@pytest.fixture
def rollout_file(run_file, base, tmp_path):
    def made(loss, rewards=("short", "wanted"), **rollout):
        texts = [f"{SENTENCES[number % 3]} {number}" for number in range(20)]
        rows = [
            {
                "prompt": text if number % 2 else [{"role": "user", "content": text}],
                "answer": "none" if number % 5 == 4 else "the",
            }
            for number, text in enumerate(texts)
        ]
        data = write_jsonl(tmp_path / "prompts.jsonl", rows)
        (tmp_path / "rewards.py").write_text(PLANTED["rewards"] + PLANTED["note"])
        return change_run(
            run_file,
            model={"path": str(base)},
            data={"path": str(data), "sequence_length": 48},
            training={"steps": 4, "batch_size": 4, "micro_batch_size": 3},
            optimizer={"lr": 0.003},
            schedule={"name": "constant"},
            loss={"max_completion_length": 8, "num_generations": 3} | loss,
            rollout={"rewards": [f"rewards.py:{name}" for name in rewards]} | rollout,
        )

    return made


def noted(folder):
    """Prompts and replies that the reward `note` was given, each time."""
    return [json.loads(line) for line in (folder / "noted").read_text().splitlines()]


LOSSES = {
    "grpo": {"name": "grpo", "beta": 0.04, "num_iterations": 2},
    "masked": {"name": "grpo", "mask_truncated_completions": True},
}


def test_prompts_of_text_stop_at_the_same_tokens_once_the_run_is_resumed(
    megatrain, rollout_file, base, tmp_path
):
    """A checkpoint's generation settings know the end of a turn, and those of the base do not."""
    file = rollout_file(LOSSES["masked"], ("short", "note"))
    turn = load_tokenizer(str(base)).convert_tokens_to_ids("<|turn|>")
    rows = [{"prompt": f"the cat {n}", "answer": "the"} for n in range(20)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    megatrain.resumed(file, 4, 2, *sets(loss__num_generations=24, optimizer__lr=0.03))
    replies = [of_step for _, of_step in noted(tmp_path)]
    assert replies[:4] == replies[4:]
    assert any(reply[-1] == turn for of_step in replies for reply in of_step)


@pytest.mark.parametrize("loss", few(LOSSES.values()), ids=LOSSES)
def test_a_run_learns_from_replies_and_goes_on_exactly(megatrain, rollout_file, tmp_path, loss):
    """With `beta` an adapter on a packed base: the reference is the base as that has it."""
    file = rollout_file(loss, weights=[1.0, 0.5], temperature=0.8)
    packed = {"adapter__method": "lora", "model__base": "nf4", "engine__precision": "bf16"}
    packed |= {"optimizer__lr": 0.1}
    changes = sets(**packed if "beta" in loss else {})

    kind = "adapter_model" if "beta" in loss else "model"
    whole, _ = megatrain.resumed(file, 4, 1, *changes, name=f"{kind}.safetensors")
    first, *others = records(whole)
    assert first["seen"] == 0 and first["completions/max_length"] <= 8
    assert first["reward"] < 0 < first["reward_std"]
    for stage in ("generate", "reward", "logprobs", "train"):
        assert 0 < first[f"{stage}_seconds"] < first["seconds"]
    # Old log-probabilities are of the model that is trained: no ratio is clipped at first.
    assert first["clip_ratio/region_mean"] == 0
    if "beta" in loss:
        assert first["kl"] == pytest.approx(0, abs=1e-6)
        assert max(abs(record.get("kl", 0)) for record in others) > 1e-4
    if "num_iterations" in loss:
        assert ["reward" in record for record in others] == [False, True, False]


def test_a_step_is_that_of_plain_torch_with_the_same_replies(
    megatrain, rollout_file, base, tmp_path
):
    """Replies of several lengths: prompts are learnt by none, each has its own advantage."""
    file = rollout_file({"name": "grpo"}, ["note", "short", "even"], weights=[1, 2, 3],
                        temperature=0.6)  # fmt: skip
    plain = {"optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0}, "training__steps": 1}
    megatrain.done("train", file, *sets(**plain, training__max_grad_norm=None))
    [(prompts, replies)] = noted(tmp_path)
    assert len({len(ids) for ids in replies}) > 1
    opened = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    tokenizer, model = load_tokenizer(str(base)), opened(base)
    rewards = [-len(ids) / 4 + 3 * sum(i % 2 == 0 for i in ids) / len(ids) for ids in replies]
    groups = torch.tensor(rewards).view(-1, 3)
    advantages = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
    loss = torch.zeros(())
    for prompt, ids, advantage in zip(prompts, replies, advantages.flatten(), strict=True):
        asked, _ = prompt_ids(tokenizer, prompt, None, "")
        logits = model(torch.tensor([asked + ids])).logits[0, len(asked) - 1 : -1] / 0.6
        log_probs = logits.log_softmax(-1)[range(len(ids)), ids]
        loss = loss - advantage * (log_probs - log_probs.detach()).exp().sum()
    (loss / sum(map(len, replies))).backward()
    trained = opened(tmp_path / "run" / "model").named_parameters()
    for (name, ours), before in zip(trained, model.parameters(), strict=True):
        torch.testing.assert_close(before - ours, before.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_async_functions_run_beside_a_loop_that_is_running(tmp_path):
    """As that of a notebook."""
    (tmp_path / "own.py").write_text(
        "import asyncio\n\nasync def later(completions, **kwargs):\n"
        "    await asyncio.sleep(0)\n    return [float(len(each)) for each in completions]\n"
    )
    rewards = Rewards(RolloutSection(rewards=[f"{tmp_path}/own.py:later"]))

    async def in_a_notebook():
        return rewards.of(["q"] * 2, ["a", "bcd"])

    assert asyncio.run(in_a_notebook()).tolist() == rewards.of(["q"] * 2, ["a", "bcd"]).tolist()


def test_steps_that_learn_from_the_same_replies_are_of_one_epoch(
    rollout_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = rollout_file({"name": "grpo", "num_iterations": 2}, ["short"])
    assert package.run(file, ["training.steps=null", "training.epochs=1"]).steps == 10


def test_held_out_prompts_are_rewarded(megatrain, rollout_file, tmp_path):
    file = rollout_file({"name": "grpo"}, ["short", "wanted"])
    held = {
        "data__eval_fraction": 0.3,
        "training__eval_every": 1,
        "checkpoint__best": "eval_reward",
    }
    early = {"training__early_stopping": {"patience": 9}, "training__steps": 2}
    result = megatrain.done("train", file, *sets(**held, **early))
    first, last = records(tmp_path / "run", "eval_seconds")
    assert (first["step"], first["eval_seen"]) == (1, 1)
    assert (last["step"], last["eval_seen"]) == (2, 2)
    length = first["eval_completions/mean_length"]
    assert first["eval_rewards/short/mean"] == pytest.approx(-length / 8)
    assert first["eval_reward"] < 0
    assert "evaluation reward" in result.output
    megatrain.done("report", tmp_path / "run")
    assert (tmp_path / "run" / "report.html").is_file()
    log = tmp_path / "run" / "metrics.jsonl"  # as if a kill had prevented the last evaluation
    log.write_text("".join(log.read_text().splitlines(True)[:-1]))
    early["training__steps"] = 3
    megatrain.done("train", file, "--resume", *sets(**held, **early))
    again = records(tmp_path / "run", "eval_seconds")
    assert [(each["step"], each["eval_seen"]) for each in again] == [(1, 1), (2, 2), (3, 3)]


def test_held_out_prompts_get_the_same_replies_however_many_are_made_at_once(
    megatrain, rollout_file, tmp_path
):
    replies = []
    for at_once in (1, 3, None):
        file = rollout_file({"name": "grpo"}, ["note"], batch_size=at_once)
        held = {"data__eval_fraction": 0.4, "training__steps": 1}
        megatrain.done("train", file, *sets(**held, output__folder=f"run-{at_once}"))
        replies.append(noted(tmp_path)[-1])
    assert replies[0] == replies[1] == replies[2]


def test_other_prompts_and_replies_come_each_step(megatrain, rollout_file, tmp_path):
    file = rollout_file({"name": "grpo"}, ["note"], temperature=0.7, top_k=40, batch_size=5)
    megatrain.done("train", file, *sets(training__steps=2))
    steps = noted(tmp_path)
    for prompts, ids in steps:
        assert len(prompts) == len(ids) == 12
        groups = [prompts[at : at + 3] for at in range(0, 12, 3)]
        assert all(first == second == third for first, second, third in groups)
        assert len({str(group[0]) for group in groups}) == 4
        assert len({tuple(each) for each in ids}) > 6
    again = sets(training__steps=1, data__kind="chat", output__folder=str(tmp_path / "chat"))
    megatrain.done("train", file, *again)
    *_, (asked, _) = noted(tmp_path)
    assert all(prompt[0]["role"] == "user" for prompt in asked)
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "the cat"}))
    one = {"data__path": str(tmp_path / "one.jsonl"), "training__batch_size": 1}
    still = {"optimizer__lr": 1e-12, "training__steps": 2, "training__micro_batch_size": 1}
    folder = {"output__folder": str(tmp_path / "one")}
    megatrain.done("train", file, *sets(**one, **still, **folder))
    *_, (asked, first), (same, second) = noted(tmp_path)
    assert asked == same and first != second  # of one prompt, by one model
    other = {"output__folder": str(tmp_path / "other"), "training__seed": 1}
    megatrain.done("train", file, *sets(**one, **still | {"training__steps": 1} | other))
    assert noted(tmp_path)[-1][1] not in (first, second)
    assert not {str(p) for p in steps[0][0]} & {str(p) for p in steps[1][0]}


@pytest.mark.parametrize("message", MISTAKES["rewards"])
def test_bad_rewards_and_prompts_are_told_in_a_line(megatrain, rollout_file, tmp_path, message):
    rewards, *keys = MISTAKES["rewards"][message]
    file = rollout_file({"name": "grpo"})
    chosen = sets(rollout__rewards=rewards, **(keys[0] if keys else {}))
    result = megatrain("train", file, *chosen)
    assert result.exit_code == (4 if "step 1: " in message or "hasty" in message else 2)
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_replies_drawn_at_another_temperature_are_not_learnt_from(megatrain, rollout_file):
    """Old log-probabilities are at the temperature of then: ratios to them would be of both."""
    file = rollout_file({"name": "grpo", "num_iterations": 2}, temperature=0.8)
    megatrain.done("train", file, *sets(training__steps=1))
    hot = sets(rollout__temperature=1.2)
    told = "for another rollout.temperature (0.8, and now 1.2); set it back"
    megatrain.refused(told, "train", file, "--resume", *hot, *sets(training__steps=2))
    megatrain.done("train", file, "--resume", *sets(training__steps=2))
    megatrain.done("train", file, "--resume", *hot, *sets(training__steps=3))
    told = "loss.beta: 0.1 now, but"  # the run has kept no reference
    megatrain.refused(told, "train", file, "--resume", *sets(training__steps=4, loss__beta=0.1))


IN_VAIN = {
    "only loss.beta's divergence is learnt (2 of 3 rollouts so far)": {"beta": 0.1},
    "all replies to each prompt are rewarded alike: nothing is learnt (2 of 3": {},
    "no reply has ended, and loss.mask_truncated_completions leaves such out: nothing is": {
        "mask_truncated_completions": True, "max_completion_length": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", IN_VAIN)
def test_steps_that_learn_nothing_of_rewards_are_said(megatrain, rollout_file, base, caplog, words):
    file = rollout_file({"name": "grpo"} | IN_VAIN[words], ("alike",))
    drawn = {"training__seed": 1, "model": {"config": tiny_llama(), "tokenizer": str(base)}}
    drawn = drawn if "beta" in IN_VAIN[words] else {}
    megatrain.done("train", file, *sets(**drawn, training__steps=3))
    assert records(file.parent / "run")[0].get("kl", 0) == pytest.approx(0, abs=1e-9)
    assert words in caplog.text and "step 3: " in caplog.text
    assert ("step 2: " in caplog.text) == ("no reply has ended" in words)
    alike = [record["frac_reward_zero_std"] for record in records(file.parent / "run")]
    assert alike == [1, 0, 1]


DRAWS = {"temperature": 0.01}, {"top_p": 1e-6}, {"top_k": 1, "repetition_penalty": 1e9}


@pytest.mark.parametrize("settings", DRAWS, ids=str)
def test_replies_are_drawn_as_the_run_file_says(megatrain, rollout_file, tmp_path, settings):
    """The likeliest token each time; of the last ones, none twice."""
    file = rollout_file({"name": "grpo"}, ["note"], **settings)
    megatrain.done("train", file, *sets(training__steps=1))
    [(_, replies)] = noted(tmp_path)
    assert all(replies[at] == replies[at - at % 3] for at in range(12))
    assert all(len({*reply}) == len(reply) for reply in replies) or "top_k" not in settings


def test_a_step_whose_replies_nobody_rewards_may_be_left_out(megatrain, rollout_file, tmp_path):
    file = rollout_file({"name": "grpo", "num_iterations": 2}, ["at_first"])
    megatrain.done("train", file, *sets(training__on_nonfinite="skip", training__steps=3))
    first, *others = records(tmp_path / "run")
    assert "None or NaN for all 12 replies" in first["skipped"] and "loss" not in first
    assert all("loss" in record for record in others)
    assert ["reward" in record for record in others] == [True, False]


def test_the_example_is_a_run_file_whose_rewards_tell_right_from_wrong():
    config = load(ROOT / "examples" / "grpo.yaml")
    settings = config.rollout.model_copy(
        update={"rewards": [f"{ROOT}/{name}" for name in config.rollout.rewards]}
    )
    rewards = Rewards(settings)
    replies = ["so #### 1,042", [{"role": "assistant", "content": "#### 7"}], "it is 1042"]
    beside = {"answer": ["1000 + 42\n#### 1042"] * 3, "self": [1] * 3, "replies": [2] * 3}
    each = rewards.of(["q"] * 3, replies, **beside)
    assert each.tolist() == [[1, 1], [0, 1], [0, 0]]
    torch.testing.assert_close(rewards.weighted_sum(each), torch.tensor([1.2, 0.2, 0]).double())


HELD_OUT = ("data.eval_fraction=0.3", "training.eval_every=2", "rollout.batch_size=4")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "held"),
    [(LOSSES["grpo"] | {"loss_type": "grpo"}, []), ({"name": "grpo"}, HELD_OUT)],
    ids=["grpo", "with evaluations"],
)
def test_ranks_learn_from_the_replies_of_one(megatrain, rollout_file, tmp_path, loss, held):
    """Two stop between two steps of the same replies, three go on; one rank alone rewards."""
    file = rollout_file(loss, ("short", "note"))
    held = (*held, "optimizer={name: sgd, lr: 0.1}")  # AdamW makes noise of sums visible
    one_rank(megatrain, file, *held)
    of_one = noted(tmp_path)
    (tmp_path / "noted").unlink()
    two_then_three(file, tmp_path, 0, *held)
    assert noted(tmp_path) == of_one != []
    assert_same_run(tmp_path / "one", tmp_path / "several", least=1e-7)
    for mine, other in zip(records(tmp_path / "several"), records(tmp_path / "one"), strict=True):
        names = ("reward", "rewards/short/std", "completions/mean_length", "kl")
        for name in (*names, *(f"eval_{name}" for name in names)):
            wanted = pytest.approx(other.get(name, 0), rel=1e-4, abs=1e-7)
            assert mine.get(name, 0) == wanted, name
    broken = rollout_file(LOSSES["grpo"], ("broken",))

    def fails(group):
        with pytest.raises(RunFailed, match="reward broken failed: KeyError"):
            run_of(broken, str(tmp_path / "none"))(group)

    run_ranks(2, tmp_path / "broken", fails)
