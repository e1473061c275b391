"""`megatrain init`: a run file that can be read, and never one that replaces another."""

from pathlib import Path

import pytest

from megatrain import config


@pytest.mark.parametrize("example", ["chat", "lora", "dpo", "grpo", "demo"])
def test_a_run_file_is_written_and_can_be_read(megatrain, example):
    result = megatrain("init", "mine/run.yaml", "--example", example)
    assert result.exit_code == 0, result.output
    loaded, text = config.load("mine/run.yaml"), Path("mine/run.yaml").read_text()
    assert "megatrain train mine/run.yaml" in text and "examples/" not in text
    for document in (word for word in text.split() if word.endswith(".md")):
        assert Path(document).is_file() and Path(document).is_absolute()
    for reward in loaded.rollout.rewards:
        assert reward.startswith("mine/grpo_rewards.py:") and Path("mine/grpo_rewards.py").is_file()


def test_nothing_is_replaced(megatrain):
    for there in ("grpo_rewards.py", "run.yaml"):
        Path(there).write_text("mine")
        result = megatrain("init", "--example", "grpo")
        assert result.exit_code == 2 and f"{there}: is there already" in result.stderr
        assert {path.read_text() for path in Path().glob("*.*")} == {"mine"}
        Path(there).unlink()
