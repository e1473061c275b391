"""`megatrain init`: a run file to begin from."""

import re
from pathlib import Path

from megatrain.base.shipped import shipped
from megatrain.errors import InputError

EXAMPLES = {"chat": "qwen2.5-7b-chat", "lora": "lora", "dpo": "dpo", "grpo": "grpo", "demo": "demo"}
_REWARDS = "grpo_rewards.py"


def write_example(example: str, run: Path) -> list[Path]:
    """Write a run file, and beside it the reward functions that it names; returns their paths."""
    name = f"examples/{EXAMPLES[example]}.yaml"
    text = shipped(name).read_text(encoding="utf-8").replace(name, str(run))
    text = re.sub(r"docs/[\w-]+\.md", lambda match: str(shipped(match[0])), text)
    files = {run: text}
    if _REWARDS in text:
        rewards = run.with_name(_REWARDS)
        files[rewards] = shipped(f"examples/{_REWARDS}").read_text(encoding="utf-8")
        files[run] = text.replace(f"examples/{_REWARDS}", str(rewards))
    for path in files:
        if path.exists():
            raise InputError(f"{path}: is there already; name a new file, or remove it")
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    return list(files)
