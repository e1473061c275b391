"""Rows that are prompts: what is read of them, what is refused, which are held out."""

import json

import pytest

from megatrain.data import open_prompts
from megatrain.errors import InputError
from tests.unit.data_cases import chat_tokenizer, talk, write_jsonl

TOKENIZER = chat_tokenizer("qwen")
ASKED = talk("What is 12 + 30?")


def prompts(path, **options):
    how = {"fields": {}, "bad_rows": "stop", "drop": False, "longest": 400, "vocab_size": 600}
    return open_prompts(path, tokenizer=TOKENIZER, **how | options)


def test_messages_that_a_table_keeps_as_json_are_messages(tmp_path):
    rows = [{"prompt": ASKED}, {"prompt": json.dumps(ASKED)}]
    plain, kept = prompts(write_jsonl(tmp_path / "a.jsonl", rows)).batch([0, 1])
    assert kept[:3] == plain[:3]
    broken = write_jsonl(tmp_path / "b.jsonl", [{"prompt": '[{"role": "user"'}])
    with pytest.raises(InputError, match=r"b\.jsonl:1: 'prompt' is not JSON"):
        prompts(broken)


@pytest.mark.parametrize("prompt", [ASKED, "12 + 30"], ids=["messages", "text"])
@pytest.mark.parametrize("name", ["system", "system_prompt", "tools", "history", "images"])
def test_what_would_change_the_prompt_is_refused_beside_it(tmp_path, name, prompt):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, name: ["Be brief."]}])
    with pytest.raises(InputError, match=rf"a\.jsonl:1: field '{name}': .*{name}: null"):
        prompts(path)
    assert prompts(path, fields={name: None}).batch([0])[0].beside == {}
    renamed = prompts(path, fields={"hint": name})
    assert renamed.batch([0])[0].beside == {"hint": ["Be brief."]}


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "system", "content": "Be good", "functions": "[]"}, "does not read 'functions'"),
        ({"role": "judge", "content": "Be good"}, "role 'judge' is none of these"),
    ],
)
def test_what_the_template_leaves_out_of_a_prompt_is_refused(tmp_path, turn, said):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [turn, *ASKED]}])
    with pytest.raises(InputError, match=rf"a\.jsonl:1.*{said}"):
        prompts(path)


def test_prompts_are_held_out_of_all_sources_by_the_seed(tmp_path):
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(20)])
        for name in ("easy", "hard")
    ]

    def parts(seed):
        train, held = prompts(paths, seed=seed).hold_out(0.25)
        return [[row.prompt for row in part.batch(range(len(part)))] for part in (train, held)]

    train, held = parts(0)
    assert len(held) == 10 and len({*train, *held}) == 40
    assert {prompt.split()[0] for prompt in held} == {"easy", "hard"}
    assert parts(0) == [train, held] and parts(1)[1] != held
    with pytest.raises(InputError, match="leaves no prompt to train on"):
        prompts(write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a"}])).hold_out(0.5)
