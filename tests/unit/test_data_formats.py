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
from tests.refusals import refused
from tests.unit.data_cases import (
    ROWS,
    chat_tokenizer,
    encode_row,
    make_tokenizer,
    talk,
    write_jsonl,
)

QWEN = chat_tokenizer("qwen")
ASK, TELL = "What is 12 + 30?", "It is 42."


def told(row, system=None):
    """The ids of a row, or of what two say by turns, and which of them are learnt."""
    if not isinstance(row, dict):
        row = {"messages": row if isinstance(row[0], dict) else talk(*row, system=system)}
    ids, targets = encode_row(QWEN, row)
    return ids.tolist(), targets.tolist()


def opened(path, tmp_path, tokenizer=QWEN, **options):
    options = {"sequence_length": 256, "packing": False, **options}
    return open_dataset(path, tokenizer=tokenizer, cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize("name", ROWS["same"])
def test_a_format_is_found_by_its_fields_and_teaches_what_its_messages_do(name):
    case = ROWS["same"][name]
    assert told(case["row"]) == told(case["same"], case.get("system"))


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
        {"instruction": ASK, "thinking": "12 and 30", "output": TELL, "history": []},
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


@pytest.mark.parametrize("problem", ROWS["refused"])
def test_what_no_loss_is_for_or_is_ambiguous_is_refused_with_the_reason(tmp_path, problem):
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS["refused"][problem]])
    with refused(rf"a.jsonl:1: .*{problem}"):
        opened(path, tmp_path)


@pytest.mark.parametrize("case", ROWS["mapped"])
def test_fields_of_other_names_are_mapped(tmp_path, case):
    fields, row = case["fields"], case["row"]
    data = opened(write_jsonl(tmp_path / "a.jsonl", [row]), tmp_path, fields=fields)
    ids = data.batch([0])["input_ids"][0].tolist()
    if "same" in case:
        assert ids[: data.num_tokens] == told(case["same"])[0]
    with pytest.raises(InputError, match=r"a.jsonl:1: .*its fields are"):
        other = {f"{name}_": value for name, value in row.items()}
        opened(write_jsonl(tmp_path / "a.jsonl", [other]), tmp_path, fields=fields)


def test_fields_that_are_none_of_ours_are_refused():
    for name in ("respones", "role"):
        with pytest.raises(InputError, match=f"data.fields: '{name}' is not a field; fields are"):
            Reading("auto", {name: "a"})


ASKED = [{"id": i, "question": f"What is {i} + 1?", "answer": f'It is {i + 1}, "naïve" ☕.\n'}
        for i in range(3)]  # fmt: skip


def written(folder):
    """The same rows in files of all kinds."""
    import pyarrow
    from pyarrow import feather, parquet

    lines = "".join(json.dumps(row) + "\n" for row in ASKED)
    table = pyarrow.Table.from_pylist(ASKED)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.json").write_text(json.dumps(ASKED, indent=1, ensure_ascii=False))
    (folder / "lines.json").write_text(lines)
    (folder / "spread.json").write_text(
        "\ufeff\n" + "\n".join(json.dumps(r, indent=2) for r in ASKED)
    )
    parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    feather.write_feather(table, folder / "file.arrow", compression="uncompressed")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ASKED[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ASKED)
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
    same = opened(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path).fingerprint
    assert opened(tmp_path / "a.parquet", tmp_path).fingerprint == same


def test_bad_rows_are_left_out_counted_and_listed(tmp_path, caplog):
    bad = [{"question": 3, "answer": "a"}, {"text": "b"}, {**ASKED[0], "label": False},
           {"question": "a", "answer": "\ud800"}]  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", [ASKED[0], *bad, ASKED[1]])
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
    write_jsonl(tmp_path / "a.jsonl", ASKED)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "The sea"}])
    with pytest.raises(InputError, match=r"b.jsonl: text, but .*a.jsonl is questions and answers"):
        opened(f"{tmp_path}/*.jsonl", tmp_path)


# Files as people have them: read where they can mean only one thing, else named for what it is.

ROW = {"question": "What is 12 + 30?", "answer": "It is 42."}
PAIRS = [ROW, {"question": "And the sea?", "answer": "Calm; it was."}]


@pytest.mark.parametrize(("name", "content"), ROWS["meant"])
def test_what_can_only_be_meant_as_rows_is_read(tmp_path, name, content):
    same = opened(write_jsonl(tmp_path / "same.jsonl", PAIRS), tmp_path).fingerprint
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert opened(tmp_path / name, tmp_path).fingerprint == same


FILES = {**ROWS["files"], "nested too deeply|must be a JSON object": {"a.json": "[" * 10**5}}


@pytest.mark.parametrize("problem", FILES)
def test_what_is_wrong_with_a_file_is_said_in_a_line(tmp_path, problem):
    for name, contents in FILES[problem].items():
        for content in [contents] if isinstance(contents, str) else contents:
            (tmp_path / name).write_bytes(content.encode("latin-1"))
            with refused(problem) as caught:
                opened(tmp_path / name, tmp_path)
            assert name in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "data/*.jsonl"])
def test_splits_beside_one_another_are_never_trained_on_together(tmp_path, pattern):
    folder = tmp_path / pattern.rpartition("/")[0]
    folder.mkdir(exist_ok=True)
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        write_jsonl(folder / name, PAIRS)
    source = str(tmp_path / pattern)
    with pytest.raises(InputError, match=r"train-.*, .*test-.*\): name the former as data.path"):
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
