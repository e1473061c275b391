"""Files as people have them: read where they can mean only one thing, else named for what it is."""

import gzip
import json
import logging

import pytest
from data_cases import chat_tokenizer, talk, write_jsonl

from megatrain.data import open_dataset
from megatrain.errors import InputError

ROW = {"question": "What is 12 + 30?", "answer": "It is 42."}
ROWS = [ROW, {"question": "And the sea?", "answer": "Calm; it was."}]


@pytest.fixture
def opened(tmp_path):
    tokenizer = chat_tokenizer("qwen")

    def opened(source=None, **options):
        return open_dataset(
            tmp_path if source is None else source, tokenizer=tokenizer, sequence_length=64,
            cache_dir=tmp_path.parent / f"{tmp_path.name}-cache", **options,
        )  # fmt: skip

    return opened


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", json.dumps(ROWS)),
        ("a.jsonl", b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.csv", "question;answer\nWhat is 12 + 30?;It is 42.\nAnd the sea?;\"Calm; it was.\"\n"),
        ("a.csv", "question\tanswer\nWhat is 12 + 30?\tIt is 42.\nAnd the sea?\tCalm; it was.\n"),
        ("a.tsv", "question,answer\r\nWhat is 12 + 30?,It is 42.\r\n"
         "And the sea?,Calm; it was.\r\n"),
    ],
)  # fmt: skip
def test_what_can_only_be_meant_as_rows_is_read(tmp_path, opened, name, content):
    same = opened(write_jsonl(tmp_path / "same.jsonl", ROWS)).fingerprint
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert opened(tmp_path / name).fingerprint == same


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a.jsonl: a picture"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0", "a.txt: a picture"),
        ("a.csv", b"PK\3\4\0\0", "a.csv: a zip archive"),
        ("a.json", b"  <!DOCTYPE html>\n<html>", "a.json: a page of HTML"),
        ("a.parquet", b"<html><body>404", "a.parquet: a page of HTML"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "packed by gzip: add .gz"),
        ("a.jsonl", b"PAR1\x15\4", "Parquet: name it .parquet"),
        ("a.jsonl", "{}".encode("utf-16"), "UTF-16: convert it: iconv"),
        ("a.csv", "question,answer\na,b\n".encode("utf-16-le"), "NUL in its header"),
        ("a.jsonl", b"{\n", "column .*of rows over several lines, name the file .json"),
        ("a.csv", b"Question, answer\na,b\n", "its fields are 'Question', ' answer'"),
        ("a.jsonl", json.dumps(talk("a", "b")).encode(), "one message is no row"),
        ("a.jsonl", b'{"text": "a", "role": "prompter"}', "one message is no row"),
        ("a.csv", b"text,role\na,assistant\n", "one message is no row"),
        ("a.jsonl", b'{"question": "a", "choices": ["b", "c"], "answer": "B"}',
         "'choices' is not read beside questions and answers"),
        ("a.csv", b"question,options,answer\na,b/c,B\n", "'options' is not read beside"),
        ("a.json", json.dumps({"train": ROWS, "test": ROWS}).encode(),
         "'train' has the rows: jq -c '.train..' FILE"),
        ("a.json", json.dumps({"data": ROWS}).encode(),
         "'data' has the rows: jq -c '.data..' FILE"),
        ("a.json", json.dumps({"version": 1, "train": ROWS}).encode(),
         "'train' has the rows: jq -c '.train..' FILE"),
        ("a.json", b'{"question": {"0": "a"}, "answer": {"0": "b"}}', "a table by columns"),
    ],
)  # fmt: skip
def test_what_a_file_is_instead_is_said_in_a_line(tmp_path, opened, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=problem) as caught:
        opened(tmp_path / name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "data/*.jsonl"])
def test_splits_beside_one_another_are_never_trained_on_together(tmp_path, opened, pattern):
    folder = tmp_path / pattern.rpartition("/")[0]
    folder.mkdir(exist_ok=True)
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        write_jsonl(folder / name, ROWS)
    source = str(tmp_path / pattern)
    with pytest.raises(InputError, match=r"train-.*, .*test-.*\): name the files to train on"):
        opened(source)
    (folder / "test-00000-of-00001.jsonl").unlink()
    write_jsonl(folder / "latest-tests.jsonl", ROWS)
    assert len(opened(source).store.documents()) == 4


def test_empty_replies_are_counted_and_said(tmp_path, opened, caplog):
    caplog.set_level(logging.WARNING)
    (tmp_path / "a.csv").write_text("question,answer\na,b\nc,\nd, \n")
    opened(tmp_path / "a.csv")
    opened(tmp_path / "a.csv")  # from kept tokens
    assert caplog.text.count(f"2 rows teach an empty reply (first: {tmp_path}/a.csv:2)") == 2
    silent = [{"messages": [*talk("a"), {"role": "assistant", "content": ""}, *talk("b", "c")]}]
    silent[0]["messages"][1]["weight"] = 0
    caplog.clear()
    opened(write_jsonl(tmp_path / "b.jsonl", silent))
    assert "empty reply" not in caplog.text
