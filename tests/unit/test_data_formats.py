"""Data in each of the usual formats teaches what the same conversation does as messages."""

import bz2
import csv
import gzip
import json
import logging
import lzma

import pytest

from megatrain.data import open_dataset, readers
from megatrain.data.rows import Reading
from megatrain.errors import InputError
from tests.inside import sized
from tests.unit.data_cases import (
    chat_tokenizer,
    encode_row,
    make_tokenizer,
    refused,
    talk,
    write_jsonl,
)

QWEN = chat_tokenizer("qwen")
ASK, TELL = "What is 12 + 30?", "It is 42."
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
TOOL = {"name": "weather", "description": "", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
WITH_TOOLS = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "It is sunny."},
    ],
    "tools": TOOLS,
}
SHARED_WITH_TOOLS = {
    "conversations": [
        {"from": "human", "value": "What is the weather in Paris?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "21 degrees"},
        {"from": "gpt", "value": "It is sunny."},
    ],
    "system": "You are a helpful assistant.",
    "tools": json.dumps([TOOL]),
}
# A row, and the same said as messages.
SAME = {
    "Alpaca": ({"instruction": ASK, "input": "", "output": TELL}, talk(ASK, TELL)),
    "the input asks": ({"instruction": None, "input": ASK, "output": TELL}, talk(ASK, TELL)),
    "Alpaca with input": (
        {"instruction": "Add", "input": "12 and 30", "output": TELL, "text": "Add 12 and 30 ..."},
        talk("Add\n12 and 30", TELL),
    ),
    "Alpaca with history": (
        {"instruction": "Thanks!", "output": "You are welcome.", "history": [[ASK, TELL]],
         "system": "You are a helpful assistant."},
        talk(ASK, TELL, "Thanks!", "You are welcome.", system="You are a helpful assistant."),
    ),
    "Dolly": (
        {"instruction": ASK, "context": "12, 30", "response": TELL, "category": "x"},
        talk(ASK + "\n12, 30", TELL),
    ),
    "GSM8K": ({"question": ASK, "answer": TELL}, talk(ASK, TELL)),
    "OpenOrca": (
        {"id": "a", "system_prompt": "You are a helpful assistant.", "question": ASK,
         "response": TELL},
        talk(ASK, TELL, system="You are a helpful assistant."),
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": TELL}]},
        talk(ASK, TELL),
    ),
    "ShareGPT with system": (
        {"conversations": [{"from": "system", "value": "sea"}, {"from": "human", "value": ASK},
                           {"from": "gpt", "value": TELL, "weight": 1.0}], "system": ""},
        talk(ASK, TELL, system="sea"),
    ),
    "ShareGPT with tools": (SHARED_WITH_TOOLS, WITH_TOOLS),
    "roles of ShareGPT": (
        {"messages": [{"role": "human", "content": ASK}, {"role": "model", "content": TELL}]},
        talk(ASK, TELL),
    ),
    "messages as JSON": ({"messages": json.dumps(talk(ASK, TELL))}, talk(ASK, TELL)),
    "messages beside what they are made of": (
        {"prompt": ASK, "question": ASK, "answer": TELL, "messages": talk(ASK, TELL), "text": "x"},
        talk(ASK, TELL),
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "value": ASK}]},
                      {"role": "assistant", "content": [{"type": "text", "text": TELL}],
                       "loss_weight": 1.0}]},
        talk(ASK, TELL),
    ),
    "TRL prompt and completion": (
        {"prompt": talk(ASK), "completion": [{"role": "assistant", "content": TELL}]},
        talk(ASK, TELL),
    ),
    "calls without a function": (
        {**WITH_TOOLS, "messages": [
            m if "tool_calls" not in m else {"role": "assistant", "tool_calls": [CALL]}
            for m in WITH_TOOLS["messages"]]},
        WITH_TOOLS,
    ),
}  # fmt: skip


def told(row):
    row = row if isinstance(row, dict) else {"messages": row}
    ids, targets = encode_row(QWEN, row)
    return ids.tolist(), targets.tolist()


def opened(path, tmp_path, tokenizer=QWEN, **options):
    options = {"sequence_length": 256, "packing": False, **options}
    return open_dataset(path, tokenizer=tokenizer, cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize("name", SAME)
def test_a_format_is_found_by_its_fields_and_teaches_what_its_messages_do(name):
    row, messages = SAME[name]
    assert told(row) == told(messages)


def test_prompts_of_messages_are_read_and_only_their_completion_is_learnt():
    before, after = talk(ASK, TELL, "Thanks!"), [{"role": "assistant", "content": "42"}]
    ids, targets = encode_row(QWEN, {"prompt": before, "completion": after})
    assert ids.tolist() == told(talk(ASK, TELL, "Thanks!", "42"))[0]
    assert QWEN.decode(ids[targets]) == "42<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Q", "Q A"), ("", "Q A"), (ASK * 2, ASK * 2), (ASK * 2, ASK), (talk(ASK), talk("x", ASK))],
)
def test_a_completion_that_does_not_repeat_its_prompt_is_read(prompt, completion):
    reading, row = Reading("auto", {}), {"prompt": prompt, "completion": completion}
    example, _ = reading.example(reading.find(row, "r:1"), row, "r:1")
    assert example[:2] == (prompt, completion) or example.messages == [*prompt, *completion]


def test_reasoning_beside_an_answer_is_that_of_the_reply():
    reading = Reading("auto", {})
    for row in (
        {"question": ASK, "reasoning": "12 and 30", "answer": TELL},
        {"instruction": ASK, "thinking": "12 and 30", "output": TELL, "history": [["a", "b"]]},
    ):
        example, unread = reading.example(reading.find(row, "r:1"), row, "r:1")
        assert not unread and example.messages[-1]["reasoning_content"] == "12 and 30"
        assert not any("reasoning_content" in message for message in example.messages[:-1])


@pytest.mark.parametrize("metaspace", [False, True])
def test_completions_of_strings_are_learnt_with_their_end_and_no_template(tmp_path, metaspace):
    tokenizer = make_tokenizer(metaspace=metaspace, bos_first=True)
    rows = [{"prompt": "The sea was", "completion": " calm."}, {"prompt": "", "completion": "42"}]
    data = opened(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path, tokenizer)
    texts = set()
    for row in range(len(data)):
        batch = data.batch([row])
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        kept = batch.get("attention_mask", ids.new_ones(1, len(ids)))[0].bool()
        ids, labels = ids[kept], labels[kept]
        whole = tokenizer("The sea was calm.")["input_ids"]
        if len(ids) == len(whole) + 1:
            assert ids.tolist() == [*whole, tokenizer.eos_token_id]
        texts.add(tokenizer.decode(ids[labels != -100]).strip())
    assert texts == {"calm.</s>", "42</s>"}


@pytest.mark.parametrize(
    "row", [{"text": "The sea"}, {"text": "<s>The sea</s>"}, {"prompt": "<s>The", "completion":
            " sea</s>"}, {"prompt": "The", "completion": " sea"}],
)  # fmt: skip
def test_special_tokens_that_rows_have_written_are_not_doubled(tmp_path, row):
    tokenizer = make_tokenizer(bos_first=True)
    batch = opened(write_jsonl(tmp_path / "a.jsonl", [row]), tmp_path, tokenizer).batch([0])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert tokenizer.decode(ids[: (labels != -100).nonzero().max() + 1]) == "<s>The sea</s>"


def test_a_token_over_the_end_of_a_prompt_is_learnt(tmp_path):
    tokenizer = make_tokenizer()
    (path,) = [write_jsonl(tmp_path / "a.jsonl", [{"prompt": "The s", "completion": "ea"}])]
    batch = opened(path, tmp_path, tokenizer).batch([0])
    assert tokenizer.decode(batch["input_ids"][0][batch["labels"][0] != -100]).endswith("sea</s>")


REFUSED = {
    "prompt only": ({"prompt": ASK}, "a prompt alone has no reply to learn"),
    "preference": ({"prompt": ASK, "chosen": TELL, "rejected": "43"}, "'chosen': pairs of"),
    "KTO": ({"prompt": ASK, "completion": TELL, "label": False}, "'label': rows of good and bad"),
    "tokens": ({"input_ids": [1, 2]}, "'input_ids': rows of tokens are not read"),
    "two answers": (
        {"problem": ASK, "solution": TELL, "answer": "42"},
        "'answer' and 'solution' could both be the answer: say which with data.fields",
    ),
    "a question about something": ({"context": "12", "question": ASK, "answer": TELL}, "'context'"),
    "a column of them": ({"question": [ASK], "answer": [TELL]}, "must be a string, not list"),
    "half": ({"prompt": ASK, "completion": talk(ASK)}, "must both be strings, or both lists"),
    "no question": ({"instruction": "", "input": "", "output": TELL}, "it asks nothing"),
    "a prompt of messages": (
        {"prompt": talk(ASK), "response": TELL}, "field 'prompt' must be .*'messages'"),
    "a question of null": ({"input": None, "output": TELL}, "'input' must be a string, not null"),
    "a prompt twice": ({"prompt": talk(ASK), "completion": talk(ASK, TELL)},
                       "'completion' repeats the prompt.*leave what 'prompt' has out of it"),
    "a text twice": ({"prompt": ASK * 2, "completion": f"{ASK * 2} {TELL}"}, "repeats the prompt"),
    "history": ({"instruction": ASK, "output": TELL, "history": [["a"]]}, "list of pairs"),
    "system": ({"prompt": ASK, "completion": TELL, "system": "sea"}, "'system'"),
    "two systems": (
        {"messages": talk(ASK, TELL, system="sea"), "system": "You are"}, "say two things"
    ),
    "speaker": ({"conversations": [{"from": "narrator", "value": "x"}]}, "'from' is 'narrator'"),
    "unknown": ({"title": "a", "body": "b"}, "are 'title', 'body', and no .* by data.fields"),
    "nothing": ({}, "its fields are none"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_loss_is_for_or_is_ambiguous_is_refused_with_the_reason(tmp_path, name):
    row, problem = REFUSED[name]
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with refused(rf"a.jsonl:1: .*{problem}"):
        opened(path, tmp_path)


@pytest.mark.parametrize(
    ("fields", "row", "same"),
    [
        ({"text": "body"}, {"body": "The sea"}, None),
        ({"answer": "solution"}, {"problem": ASK, "solution": TELL, "answer": "42"},
         talk(ASK, TELL)),
        ({"question": "q", "answer": "a"}, {"q": ASK, "a": TELL, "text": "x"}, talk(ASK, TELL)),
        ({"messages": "chosen", "rejected": None}, {"chosen": talk(ASK, TELL), "rejected": "x"},
         talk(ASK, TELL)),
        ({"label": None}, {"messages": talk(ASK, TELL), "label": True}, talk(ASK, TELL)),
        ({"instruction": "question", "input": "context", "output": "answer"},
         {"context": "x", "question": ASK, "answer": TELL}, talk(ASK + "\nx", TELL)),
    ],
)  # fmt: skip
def test_fields_of_other_names_are_mapped(tmp_path, fields, row, same):
    data = opened(write_jsonl(tmp_path / "a.jsonl", [row]), tmp_path, fields=fields)
    ids = data.batch([0])["input_ids"][0].tolist()
    if same is not None:
        assert ids[: data.num_tokens] == told(same)[0]
    with pytest.raises(InputError, match=r"a.jsonl:1: .*its fields are"):
        other = {f"{name}_": value for name, value in row.items()}
        opened(write_jsonl(tmp_path / "a.jsonl", [other]), tmp_path, fields=fields)


def test_fields_that_are_none_of_ours_are_refused():
    for name in ("respones", "role"):
        with pytest.raises(InputError, match=f"data.fields: '{name}' is not a field; fields are"):
            Reading("auto", {name: "a"})


ROWS = [{"id": i, "question": f"What is {i} + 1?", "answer": f'It is {i + 1}, "naïve" ☕.\n'}
        for i in range(3)]  # fmt: skip


def written(folder):
    """The same rows in files of all kinds."""
    import pyarrow
    from pyarrow import feather, parquet

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.json").write_text(json.dumps(ROWS, indent=1, ensure_ascii=False))
    (folder / "lines.json").write_text(lines)
    (folder / "spread.json").write_text(
        "\ufeff\n" + "\n".join(json.dumps(r, indent=2) for r in ROWS)
    )
    parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    feather.write_feather(table, folder / "file.arrow", compression="uncompressed")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    for suffix, pack in {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.items():
        for name in ("a.jsonl", "a.json", "a.csv"):
            with pack(folder / f"{name}{suffix}", "wb") as file:
                file.write((folder / name).read_bytes())
    with pyarrow.output_stream(str(folder / "a.json.zst"), compression="zstd") as file:
        file.write((folder / "a.json").read_bytes())
    return [path for path in sorted(folder.iterdir()) if path.name != "a.jsonl"]


def test_the_same_rows_from_files_of_all_kinds_are_the_same(tmp_path, monkeypatch):
    folder = tmp_path / "rows"
    folder.mkdir()
    paths = written(folder)
    expected = opened(folder / "a.jsonl", tmp_path)
    for piece in (readers.PIECE_BYTES, 3):
        sized(monkeypatch, readers, PIECE_BYTES=piece)
        for path in paths:
            assert opened(path, tmp_path / str(piece)).fingerprint == expected.fingerprint, path


def test_nulls_that_tables_fill_in_are_not_arguments(tmp_path):
    import pyarrow
    from pyarrow import parquet

    def row(**arguments):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {"messages": [*talk(ASK), {"role": "assistant", "tool_calls": [call]}]}

    rows = [row(city="Paris"), row(days=3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert (
        opened(tmp_path / "a.parquet", tmp_path).fingerprint == opened(path, tmp_path).fingerprint
    )


def test_bad_rows_are_left_out_counted_and_listed(tmp_path, caplog):
    bad = [{"question": 3, "answer": "a"}, {"text": "b"}, {**ROWS[0], "label": False},
           {"question": "a", "answer": "\ud800"}]  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], *bad, ROWS[1]])
    with path.open("a") as file:
        file.write('{"question": \n')
    with pytest.raises(InputError, match=r"a.jsonl:2: field 'question'"):
        opened(path, tmp_path)
    for _ in range(2):
        caplog.clear()
        data = opened(path, tmp_path, bad_rows="skip")
        assert len(data) == 2
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert said[0] == "left out 5 bad rows:" and len(said) == 6
        for number, line in zip((2, 3, 4, 5, 7), said[1:], strict=True):
            assert f"a.jsonl:{number}: " in line
    only_bad = write_jsonl(tmp_path / "b.jsonl", bad)
    with pytest.raises(InputError, match=r"every row is bad: .*b.jsonl:1: field 'question'"):
        opened(only_bad, tmp_path, fields={"question": "question"}, bad_rows="skip")
    with pytest.raises(InputError, match="no chat template"):  # no row's fault
        opened(path, tmp_path, make_tokenizer(None), bad_rows="skip")


def test_text_and_conversations_are_not_mixed(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "The sea"}])
    with pytest.raises(InputError, match=r"b.jsonl: text, but .*a.jsonl is questions and answers"):
        opened(f"{tmp_path}/*.jsonl", tmp_path)


# Files as people have them: read where they can mean only one thing, else named for what it is.

ROW = {"question": "What is 12 + 30?", "answer": "It is 42."}
PAIRS = [ROW, {"question": "And the sea?", "answer": "Calm; it was."}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", json.dumps(PAIRS)),
        ("a.jsonl", b"\xef\xbb\xbf\n" + json.dumps(PAIRS, indent=1).encode()),
        ("a.csv", "question;answer\nWhat is 12 + 30?;It is 42.\nAnd the sea?;\"Calm; it was.\"\n"),
        ("a.csv", "question\tanswer\nWhat is 12 + 30?\tIt is 42.\nAnd the sea?\tCalm; it was.\n"),
        ("a.tsv", "question,answer\r\nWhat is 12 + 30?,It is 42.\r\n"
         "And the sea?,Calm; it was.\r\n"),
    ],
)  # fmt: skip
def test_what_can_only_be_meant_as_rows_is_read(tmp_path, name, content):
    same = opened(write_jsonl(tmp_path / "same.jsonl", PAIRS), tmp_path).fingerprint
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert opened(tmp_path / name, tmp_path).fingerprint == same


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", '[{"text": "a"}', "a.json:2: the list of rows is cut off"),
        ("a.json", '[{"text": "a"}, {"text": ', "a.json:2: not JSON"),
        ("a.json", '[{"text": "a"}] {"text": "b"}', "more after the list"),
        ("a.json", '[{"text": "a"}, 3]', "a.json:2: a row must be a JSON object, this is a int"),
        ("a.json", '{"of": 1, "data": [{"text": "a"}]}', "'of', 'data', and .*rows in a field"),
        ("a.json", '{"text": "a", "text": "b"}', "a.json:1: .*there twice"),
        ("a.json", "[]", "a.json: no rows in it"),
        ("a.json", "[" * 10**5, "nested too deeply|must be a JSON object"),
        ("a.json", b'[{"text": "caf\xe9"}]', "a.json: cannot be read: .utf-8. codec"),
        ("a.csv", "text,text\na,b\n", "column 'text' is there twice"),
        ("a.csv", "text,id\na,b\na\n", "a.csv:2: 1 values for 2 columns"),
        ("a.csv", 'text,id\n"a,b\n', "a.csv:1: not CSV"),
        ("a.csv", "text\n", "a.csv: no rows"),
        ("a.csv", "text\0;id\na;b\n", "a.csv: NUL in its header"),
        ("a.arrow", "text", "a.arrow: not a readable Arrow file"),
        ("a.jsonl", b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a.jsonl: a picture"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0", "a.txt: a picture"),
        ("a.csv", b"PK\3\4\0\0", "a.csv: a zip archive"),
        ("a.json", b"  <!DOCTYPE html>\n<html>", "a.json: a page of HTML"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "packed by gzip: add .gz"),
        ("a.jsonl", b"PAR1\x15\4", "Parquet: name it .parquet"),
        ("a.jsonl", "{}".encode("utf-16"), "UTF-16: convert it: iconv"),
        ("a.csv", "question,answer\na,b\n".encode("utf-16-le"), "NUL in its header"),
        ("a.jsonl", b"{\n", "column .*takes several lines needs a file named .json"),
        ("a.csv", b"Question, answer\na,b\n", "its fields are 'Question', ' answer'"),
        ("a.jsonl", json.dumps(talk("a", "b")).encode(), "one message is no row"),
        ("a.jsonl", b'{"text": "a", "role": "prompter"}', "one message is no row"),
        ("a.jsonl", b'{"question": "a", "choices": ["b", "c"], "answer": "B"}',
         "'choices' is not read beside questions and answers"),
        ("a.json", json.dumps({"train": PAIRS, "test": PAIRS}).encode(),
         "its fields are 'train', 'test', and .*rows in a field: jq -c"),
        ("a.json", b'{"question": {"0": "a"}, "answer": {"0": "b"}}', "a table by columns"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_in_a_line(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(problem) as caught:
        opened(path, tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "data/*.jsonl"])
def test_splits_beside_one_another_are_never_trained_on_together(tmp_path, pattern):
    folder = tmp_path / pattern.rpartition("/")[0]
    folder.mkdir(exist_ok=True)
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        write_jsonl(folder / name, PAIRS)
    source = str(tmp_path / pattern)
    with pytest.raises(InputError, match=r"train-.*, .*test-.*\): name the files to train on"):
        opened(source, tmp_path)
    (folder / "test-00000-of-00001.jsonl").unlink()
    write_jsonl(folder / "latest-tests.jsonl", PAIRS)
    assert len(opened(source, tmp_path).store.documents()) == 4


def test_empty_replies_are_counted_and_said(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    (tmp_path / "a.csv").write_text("question,answer\na,b\nc,\nd, \n")
    opened(tmp_path / "a.csv", tmp_path)
    opened(tmp_path / "a.csv", tmp_path)  # from kept tokens
    assert caplog.text.count(f"2 rows teach an empty reply (first: {tmp_path}/a.csv:2)") == 2
    silent = [{"messages": [*talk("a"), {"role": "assistant", "content": ""}, *talk("b", "c")]}]
    silent[0]["messages"][1]["weight"] = 0
    caplog.clear()
    opened(write_jsonl(tmp_path / "b.jsonl", silent), tmp_path)
    assert "empty reply" not in caplog.text
