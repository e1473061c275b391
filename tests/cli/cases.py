"""A tiny model, a little text and a run file that trains in seconds on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.telemetry.metrics import read_metrics
from tests.refusals import table
from tests.unit.data_cases import write_jsonl

MISTAKES = table(__file__, "mistakes.yaml")
SENTENCES = ["the cat sat on the mat", "a dog ran to the cat", "the mat was on the dog"]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on the mat"}]


def write_rows(path: Path, rows: int) -> Path:
    """A JSONL file of short documents."""
    return write_jsonl(path, [{"text": f"{SENTENCES[i % 3]} {i}"} for i in range(rows)])


def tiny_llama(**changes) -> dict:
    """A model small enough to train in a moment, as the `config` of a run file."""
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    } | changes


def write_run_file(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A valid run file for a tiny model: 6 steps of 4 rows in 2 micro-batches; with changes."""
    tree = {
        "model": {"config": tiny_llama(), "tokenizer": str(tokenizer)},
        "data": {
            "kind": "text",
            "path": str(write_rows(folder / "rows.jsonl", 120)),
            "sequence_length": 32,
            "eval_fraction": 0.1,
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"lr": 0.01},
        "training": {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "eval_every": 3},
        "schedule": {"name": "linear", "warmup_steps": 2},
        "engine": {"precision": "fp32", "device": "cpu"},
        "output": {"folder": str(folder / "run"), "log_every": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return change_run(folder / "run.yaml", **changes)


def change_run(path: Path, **changes: Any) -> Path:
    """Change keys of a run file, as `section__key=value`, or all of a `section=value`."""
    tree = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    path.write_text(yaml.safe_dump(tree))
    return path


def records(run: Path, name: str = "step") -> list[dict[str, Any]]:
    """The lines of a run's log that have a name."""
    return [line for line in read_metrics(run / "metrics.jsonl") if name in line]


def sets(**overrides: Any) -> list[str]:
    """`a__b=1` as `--set a.b=1`."""
    pairs = [f"{name.replace('__', '.')}={json.dumps(v)}" for name, v in overrides.items()]
    return [part for pair in pairs for part in ("--set", pair)]


def assert_refused(result: Any, expected: str, code: int = 2) -> None:
    """A command has ended with one line of error that has `expected` in it."""
    [line] = [line for line in result.stderr.splitlines() if "error:" in line]
    assert line.startswith("megatrain: error: ") and expected in line
    assert result.exit_code == code and "Traceback" not in result.stderr


def leave_out(replace: Callable[[Any, str, Any], None]) -> None:
    """Let runs draw no pictures and save in small pieces.

    That is half of the time of a tiny run, and 64 MiB of room for each that saves.

    `replace(owner, name, value)` is `setattr`, or a fixture's that puts back what was there.
    """
    from megatrain.checkpoint import files
    from megatrain.train import loop

    assert loop.draw  # what was renamed would be done again, unnoticed
    replace(loop, "draw", lambda *args: None)
    replace(files, "PIECE_BYTES", 1 << 20)


def trained_in_short(run_file: Path, *arguments: str) -> None:
    """Train for fixtures of a session, which no test's patches reach."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch.setattr)
        result = CliRunner().invoke(app, ["train", str(run_file), *arguments])
    assert result.exit_code == 0, result.output
