"""Each key of a run file's `data` changes what is trained or evaluated, or is refused."""

import json

import pytest
import yaml
from data_cases import chat_tokenizer, talk, write_jsonl

from megatrain.config import DataSection, load
from megatrain.data import RowStream
from megatrain.errors import InputError
from megatrain.train.data import open_data

CHAT = {"path": "chat.jsonl"}
STREAM = {"streaming": True, "shuffle_buffer": 1024, "path": ["long.jsonl"]}
BOTH = {"path": ["text.jsonl", "long.jsonl"], "weights": [1, 1]}
# For each key: what stands beside it, one value, and another.
KEYS = {
    "kind": ({}, "text", "chat"),
    "path": ({}, "text.jsonl", ["text.jsonl", "long.jsonl"]),
    "sequence_length": ({}, 64, 32),
    "weights": (BOTH, None, [3, 1]),
    "repeat": (BOTH, False, True),
    "streaming": ({}, False, True),
    "shuffle_buffer": (STREAM, 1024, 4096),
    "eval_path": ({}, None, "long.jsonl"),
    "eval_fraction": ({}, 0.0, 0.3),
    "packing": (CHAT, True, False),
    "fields": (CHAT, {}, {"messages": "turns"}),
    "bad_rows": ({"path": "bad.jsonl"}, "stop", "skip"),
    "overlong": (CHAT | {"sequence_length": 40}, "truncate", "drop"),
    "hub_config": ({}, None, "one"),
    "hub_split": ({}, "train", "test"),
    "cache_dir": ({}, "one", "two"),
}


def opened(folder, caplog, **data):
    """All that a person sees of the data of a run file."""
    tokenizer, caplog_at = chat_tokenizer("qwen"), len(caplog.records)
    tree = {
        "model": {"path": "model"},
        "data": {"path": "text.jsonl", "sequence_length": 64, "cache_dir": "cache"} | data,
        "training": {"steps": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    try:
        training, sets = open_data(load(folder / "run.yaml"), tokenizer, len(tokenizer))
    except InputError as error:
        return str(error)
    rows = [training.batch([row])["input_ids"].tolist() for row in range(3)]
    said = [each.getMessage() for each in caplog.records[caplog_at:] if "choose" in each.msg]
    kept = sorted(path.parent.name for path in folder.glob("*/tokens-*.lock"))
    size = training.block.num_tokens if isinstance(training, RowStream) else len(training)
    held_out = {name: each.fingerprint for name, each in sets.items()}
    return json.dumps([type(training).__name__, size, rows, held_out, said, kept])


@pytest.mark.parametrize("key", DataSection.model_fields)
def test_each_key_has_an_effect(tmp_path, monkeypatch, caplog, key):
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"the sea {n} " * (n % 5 + 1), "other": f"a story {n}"} for n in range(40)]
    chats = [
        {"messages": talk("What?", f"It is {n}. " * (n % 9 + 1)), "turns": talk("Who?", f"He {n}.")}
        for n in range(20)
    ]
    write_jsonl(tmp_path / "text.jsonl", texts)
    write_jsonl(tmp_path / "long.jsonl", texts[::-1] * 40)
    write_jsonl(tmp_path / "chat.jsonl", chats)
    write_jsonl(tmp_path / "bad.jsonl", [*texts, {"text": 3}])
    beside, one, other = KEYS[key]
    seen = []
    for value in (one, other):
        seen.append(opened(tmp_path, caplog, **beside | {key: value}))
        for kept in tmp_path.glob("*/tokens-*.lock"):
            kept.unlink()
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"shuffle_buffer": 2048}, "shuffle_buffer needs streaming"),
        ({"text_field": "a"}, "data.text_field: unknown key; its name here is data.fields"),
    ],
)
def test_keys_that_would_mean_nothing_are_refused(tmp_path, caplog, data, problem):
    assert problem in opened(tmp_path, caplog, **data)
