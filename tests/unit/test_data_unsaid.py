"""What a file says about its training is honoured, or refused in one line: never dropped."""

import json
import logging

import pytest

from megatrain.data import open_dataset
from megatrain.errors import InputError
from tests.refusals import refused
from tests.unit.data_cases import (
    ROWS,
    chat_tokenizer,
    encode_row,
    make_tokenizer,
    talk,
    write_jsonl,
)

TURNS = talk("What is 12 + 30?", "It is 42.", "Thanks!", "You are welcome.")


def open_rows(tmp_path, rows, kind="chat", tokenizer="qwen", name="rows.jsonl"):
    path = write_jsonl(tmp_path / name, rows)
    made = make_tokenizer() if kind == "text" else chat_tokenizer(tokenizer)
    return open_dataset(path, kind=kind, tokenizer=made, sequence_length=512, packing=False,
                        cache_dir=tmp_path / "cache")  # fmt: skip


def learnt(tmp_path, row, tokenizer="qwen"):
    """What a single conversation teaches, and the whole text of it."""
    batch = open_rows(tmp_path, [row], tokenizer=tokenizer).batch([0])
    made, ids = chat_tokenizer(tokenizer), batch["input_ids"][0]
    return made.decode(ids[batch["labels"][0] != -100]), made.decode(ids)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("a.feather", b"ARROW1\0\0"), ("a.xlsx", b"PK\3\4"), ("a.pdf", b"%PDF-"), ("a.tar", b"a\0"),
     ("a.pkl", b"\x80\4"), ("a.parquet.gz", b"\x1f\x8b")],
)  # fmt: skip
@pytest.mark.parametrize("inside", ["file", "folder"])
def test_files_of_rows_are_never_read_as_the_text_of_a_document(tmp_path, name, begins, inside):
    path = tmp_path / "corpus" / name
    path.parent.mkdir()
    path.write_bytes(begins + b"The sea was calm.")
    with refused(rf"{name}: "):
        open_dataset(path if inside == "file" else path.parent, tokenizer=make_tokenizer(),
                     kind="text", sequence_length=64, cache_dir=tmp_path / "cache")  # fmt: skip


OBJECT = {"id": 1, "instruction": "Where?", "output": "There.\n"}


@pytest.mark.parametrize("name", ["a.txt", "a"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps([OBJECT] * 2, indent=2),
        "\ufeff\n" + json.dumps([OBJECT]),
        json.dumps({"data": [OBJECT] * 2}, indent=2),
        "\n".join([json.dumps(OBJECT, indent=2)] * 2),
        f"{json.dumps(OBJECT)}{json.dumps(OBJECT)}",
        ",\n".join([json.dumps(OBJECT)] * 2),
        json.dumps([{"messages": talk("sea " * 10**5, "a")}] * 2, indent=2),
        "\n".join([json.dumps({"text": "sea " * 10**5}, indent=2)] * 2),
    ],
    ids=["spread list", "one", "wrapped", "spread", "no space", "commas", "long",
         "spread and cut"],
)  # fmt: skip
def test_lists_of_rows_and_rows_over_several_lines_are_not_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with refused(rf"{name}: rows of JSON .* \.json"):
        open_dataset(path, kind="text", tokenizer=make_tokenizer(), sequence_length=64,
                     cache_dir=tmp_path / "cache")  # fmt: skip


@pytest.mark.parametrize("text", [*ROWS["prose"], "{ " * 10**5, "[{" + "sea " * 10**5])
def test_prose_and_code_that_begin_as_rows_do_are_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    data = open_dataset(tmp_path / "a.txt", kind="text", tokenizer=make_tokenizer(),
                        sequence_length=64, cache_dir=tmp_path / "cache")  # fmt: skip
    assert data.num_tokens > 4


@pytest.mark.parametrize("field", ROWS["unheeded"])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_row_that_says_what_is_not_heeded_is_refused(tmp_path, field, kind):
    if kind == "text" and field in ("functions", "function_call", "documents"):
        return  # they mean nothing for a text
    good = {"messages": TURNS, "text": "The sea was calm."}
    for value in ROWS["unheeded"][field]:
        with refused(rf"rows.jsonl:2: .*'{field}'.*: "):
            open_rows(tmp_path, [good, good | {field: value}], kind)
    for value in (None, [], ""):
        assert len(open_rows(tmp_path, [good, good | {field: value}], kind)) == 2
    if kind == "chat" and "weight" in field:
        assert len(open_rows(tmp_path, [good | {field: 1}])) == 1


OF_CALLS = {
    "function_calls": (1, "weather(city='Paris')", "'tool_calls'"),
    "functions": (0, '[{"name": "weather"}]', "'tools' of the row"),
    "tools": (0, [{"name": "weather"}], "'tools' of the row"),
}


@pytest.mark.parametrize("field", OF_CALLS)
@pytest.mark.parametrize("tokenizer", ["qwen", "llama3", "marked"])
def test_calls_and_tools_under_other_names_are_refused_where_no_template_reads_them(
    tmp_path, field, tokenizer
):
    turn, value, remedy = OF_CALLS[field]
    turns = [{"role": "system", "content": "You are a helpful assistant."}, *map(dict, TURNS)]
    turns[2 * turn][field] = value
    problem = rf"rows.jsonl:1: message {2 * turn + 1}: .*does not read '{field}': .*{remedy}"
    with refused(problem):
        learnt(tmp_path, {"messages": turns}, tokenizer)
    for nothing in (None, "", []):
        turns[2 * turn][field] = nothing
        assert "You are welcome." in learnt(tmp_path, {"messages": turns}, tokenizer)[0]


def test_a_template_that_reads_calls_under_other_names_is_given_them():
    tokenizer = chat_tokenizer("olmo")
    turns = [{"role": "system", "content": "sea", "functions": "weather"}, *map(dict, TURNS)]
    turns[2]["function_calls"] = "weather()"
    ids, targets = encode_row(tokenizer, {"messages": turns})
    assert "<functions>weather</functions>" in tokenizer.decode(ids)
    assert "It is 42.<calls>weather()</calls><|im_end|>" in tokenizer.decode(ids[targets])


def test_fields_of_messages_that_the_template_does_not_name_are_told(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    turns = [{**message, "nothing": None} for message in TURNS]
    turns[1] |= {"thought": "deep", "reasoning_details": [{"text": "a"}], "name": "b"}
    pair = {"chosen": turns, "rejected": [turns[0], *talk("a", "No")[1:]]}
    for kind, row in (("chat", {"messages": turns, "id": 3}), ("pairs", pair)):
        for _ in range(2):  # the second time from the kept tokens
            caplog.clear()
            open_rows(tmp_path, [row], kind)
            fields = "'thought (of messages)', 'reasoning_details (of messages)', "
            told = [r.getMessage() for r in caplog.records if "not read: " in r.getMessage()]
            assert len(told) == 1 and fields in told[0] and "nothing" not in told[0]
    caplog.clear()
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template += "{# thought #}"
    path = write_jsonl(tmp_path / "b.jsonl", [{"messages": turns}])
    open_dataset(path, tokenizer=tokenizer, sequence_length=512, cache_dir=tmp_path)
    assert "'reasoning_details (of messages)'" in caplog.text and "thought" not in caplog.text


def test_keys_of_content_parts_are_told_or_refused(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    part = {"type": "text", "text": "so", "citations": ["a"], "index": None}
    assert learnt(tmp_path, {"messages": talk("Where?", [part])})[0] == "so<|im_end|>"
    assert "not read: 'text.citations (of messages)'" in caplog.text
    for key, value in {"weight": 0, "train": False, "image": "a.png"}.items():
        with refused(rf"rows.jsonl:1: message 2: field '{key}': "):
            learnt(tmp_path, {"messages": talk("Where?", [part | {key: value}])})


@pytest.mark.parametrize("turn", [0, 1])
def test_a_message_that_says_what_is_not_heeded_is_refused(tmp_path, turn):
    fields = ROWS["unheeded of replies" if turn else "unheeded of questions"]
    for field, value in [(name, value) for name, values in fields.items() for value in values]:
        turns = [dict(message) for message in TURNS]
        turns[turn][field] = value
        with pytest.raises(InputError, match=rf"rows.jsonl:1: message .: .*'{field}'.*: "):
            open_rows(tmp_path, [{"messages": turns}])


def calls(*arguments):
    given = [{"type": "function", "function": {"name": "weather", "arguments": a}}
             for a in arguments]  # fmt: skip
    return [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": given},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "It is warm."},
    ]


def test_arguments_written_as_json_teach_what_those_written_as_objects_do(tmp_path):
    value = {"city": "Paris", "days": [1, 2], "unit": None, "a": {"b": 'naïve "café"'}}
    only, whole = learnt(tmp_path, {"messages": calls(value)})
    assert '{"name": "weather", "arguments": {"city": "Paris"' in only
    for text in (json.dumps(value), json.dumps(value, indent=2)):
        assert learnt(tmp_path, {"messages": calls(text)}) == (only, whole)
    assert learnt(tmp_path, {"messages": calls("")}) == learnt(tmp_path, {"messages": calls({})})


@pytest.mark.parametrize(
    "arguments",
    ["{", "Paris", '"Paris"', "[1]", "3", 3, [1], True, '{"a": 1, "a": 2}', "[" * 10**5],
)
def test_arguments_that_are_no_json_object_are_refused(tmp_path, arguments):
    with refused(r"rows.jsonl:1: message 2: .*'arguments'.*: "):
        learnt(tmp_path, {"messages": calls({}, arguments)})


@pytest.mark.parametrize("tokenizer", ["llama3", "marked", "gemma"])
def test_calls_and_tools_that_the_template_has_no_place_for_are_refused(tmp_path, tokenizer):
    turns = calls({})
    turns[1]["content"] = "I shall look."
    with pytest.raises(InputError, match=r"message 2: .*chat template .*'tool_calls'"):
        learnt(tmp_path, {"messages": turns}, tokenizer)
    row = {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(InputError, match=r"rows.jsonl:1: .*chat template .*'tools'"):
        learnt(tmp_path, row, tokenizer)


@pytest.mark.parametrize("role", ["Assistant", "agent", ""])
def test_roles_that_nobody_knows_are_refused(tmp_path, role):
    turns = [TURNS[0], {"role": role, "content": "It is 42."}, *TURNS[2:]]
    with pytest.raises(InputError, match=rf"rows.jsonl:1: message 2: .*{role}.*: "):
        learnt(tmp_path, {"messages": turns})
