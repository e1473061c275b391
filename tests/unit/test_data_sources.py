"""Whatever lies on the disk: rows with their place, or one clear line."""

import gzip
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import ByT5Tokenizer

from megatrain.data import load_tokenizer, open_dataset, readers, stdlib_corpus, train_bpe_tokenizer
from megatrain.data.demo_corpus import END_OF_TEXT, PADDING
from megatrain.data.sources import find_files, open_sources
from megatrain.errors import InputError
from tests.inside import sized
from tests.refusals import refused
from tests.unit.data_cases import ROWS, make_tokenizer, write_jsonl

GOOD = json.dumps({"text": "The sea was calm."}).encode() + b"\n"


def open_text(source, tmp_path, **options):
    options = {"tokenizer": make_tokenizer(), "sequence_length": 16, **options}
    return open_dataset(source, kind="text", cache_dir=tmp_path / "cache", **options)


def as_source(path):
    (file,) = find_files(path, "text")
    return file


def test_folders_are_read_in_order_without_hidden_empty_or_linked_ones(tmp_path, caplog):
    root = tmp_path / "corpus"
    for name in ("b.py", "a/z.txt", "a/y.jsonl", ".hidden", ".git/c.py", "__pycache__/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(GOOD)
    (root / "empty.py").touch()
    (root / "a" / "loop").symlink_to(root)
    names = [str(f.path.relative_to(root)) for f in find_files(root, "text")]
    assert names == ["b.py", "a/y.jsonl", "a/z.txt"]
    assert [f.format for f in find_files(root, "text")] == ["text", "jsonl", "text"]
    assert [f.path.name for f in find_files(root, "chat")] == ["y.jsonl"]
    globbed, _ = open_sources([f"{root}/**/*.py", str(root / "b.py"), root / "a"], "text")
    assert [f.path.name for f in globbed] == ["b.py", "y.jsonl", "z.txt"]
    assert caplog.text.count("named twice, and read once") == 1


def test_paths_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for name, problem in {
        "gone.txt": "No such file",
        "empty.txt": "is empty",
        "folder": "no non-empty file in",
        "*.parquet": "no non-empty file in",
        "a": "symbolic link",
        "dangling": "No such file",
        "pipe": "not a plain file",
        "nul\0": "null",
        "x" * 300 + ".txt": "too long",
    }.items():
        with pytest.raises(InputError, match=problem) as caught:
            find_files(tmp_path / name, "text")
        assert name[:100] in str(caught.value).replace("\\x00", "\0")
    with pytest.raises(InputError, match="no path"):
        open_sources([], "text")


LINES = {
    **ROWS["lines"],
    "nested too deeply": '{"text": ' + "[" * 100_000,
    "longer than": '{"text": "' + "a" * 400 + '"}',
}


@pytest.mark.parametrize("problem", LINES)
def test_a_bad_jsonl_line_is_named_with_its_number(tmp_path, monkeypatch, problem):
    if problem == "longer than":
        sized(monkeypatch, readers, MAX_LINE_BYTES=300)
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + LINES[problem].encode("latin-1") + b"\n" + GOOD)
    with refused(rf"data.jsonl:3: .*{problem}"):
        open_text(path, tmp_path)
    assert not list((tmp_path / "cache").glob("tokens-*/"))  # nothing half-written


def test_odd_but_valid_jsonl_is_read(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + GOOD + b"\r\n  \n" + b'{"text": "x", "more": NaN}\r\n'
        b'{"text": "no newline at the end \\u0000 \\ud83d\\ude00"}'
    )
    rows = list(readers.read_rows(as_source(path), str.isidentifier))
    assert [number for number, _ in rows] == [1, 4, 5]
    assert rows[1][1]["text"] == "x" and rows[2][1]["text"].endswith("\0 😀")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a\nb\ncaf\xe9 is not UTF-8", "byte 0xe9 at byte offset 7"),
        (b"a" * 700 + b"\xff", "byte 0xff at byte offset 700"),
        (b"ends in the middle of \xe2\x82", "byte 0xe2 at byte offset 22"),
        ("UTF-16".encode("utf-16-le"), "NUL at byte offset 1"),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_the_offset(tmp_path, monkeypatch, data, problem):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    for piece in (256 * 1024, 64):
        sized(monkeypatch, readers, PIECE_BYTES=piece)
        with pytest.raises(InputError, match=rf"text.txt: .*{problem}"):
            list(readers.read_text(as_source(path)))


def test_broken_compression_is_named(tmp_path):
    packed = gzip.compress(GOOD * 1000)
    for name, data in {
        "cut": packed[:-20],
        "not": GOOD,
        "flipped": packed[:20] + b"x" * 30,
    }.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"{name}.jsonl.gz: cannot be read: \w+"):
            list(readers.read_rows(as_source(path), str.isidentifier))


def test_parquet_problems_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"body": ["a"], "text": [1]}), path)
    with pytest.raises(
        InputError,
        match=r"table.parquet:1: its fields are 'body'.*a row needs one of: story.: rename",
    ):
        open_text(path, tmp_path, fields={"text": "story"})
    with pytest.raises(InputError, match=r"table.parquet:1: field 'text' must be a string"):
        open_text(path, tmp_path)
    assert len(open_text(path, tmp_path, fields={"text": "body"})) == 1
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"table.parquet: not a readable Parquet file"):
        open_text(path, tmp_path, fields={"text": "body"})
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text"] * 2)
    parquet.write_table(twice, path)
    with pytest.raises(InputError, match=r"table.parquet: column 'text' is there twice"):
        open_text(path, tmp_path)
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(InputError, match=r"table.parquet: no rows"):
        open_text(path, tmp_path)


def test_hub_data_sets_come_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"body": ["The sea was calm.", "Thanks!"], "id": [1, 2]})
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    options = {"hub_config": "plain", "hub_split": "validation", "fields": {"text": "body"}}
    data = open_text("someone/stories", tmp_path, **options)
    assert asked == [(("someone/stories", "plain"), {"split": "validation"})]
    assert "someone/stories[validation]:2" in data.describe(0)
    with pytest.raises(
        InputError, match="its fields are 'body', 'id', .*a row needs one of: text.: rename"
    ):
        open_text("someone/stories", tmp_path)


def test_tokenizers_are_loaded_or_refused(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good")("The sea")["input_ids"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="model: no tokenizer in this folder"):
        load_tokenizer(tmp_path / "model")
    for path in (tmp_path / "gone", "./gone", tmp_path / "good" / "tokenizer.json"):
        with pytest.raises(InputError, match=f"^{path}: no such folder; check the path$"):
            load_tokenizer(path)
    for content in ("{", '{"version": "1.0"}', "[]"):
        (tmp_path / "good" / "tokenizer.json").write_text(content)
        with refused("cannot load a tokenizer from .*good"):
            load_tokenizer(tmp_path / "good")


BPE = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": ["a é"]}
# Each ends the process where the library reads it as it is, in its own panic or in an abort.
DEADLY = {
    "a panic": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "charsmap"),
    "an id": ({"model": {**BPE, "vocab": {**BPE["vocab"], "b": 4_000_000_000}}}, "4000000000 is"),
    "a prefix": ({"model": {**BPE, "continuing_subword_prefix": "x"}}, "'é' lacks 'x'"),
    "several": ({"tokenizer_class": "RagTokenizer"}, "RagTokenizer is not one tokenizer"),
    "a template": ({"chat_template": {"a": 3}}, "chat_template is no text"),
}


@pytest.mark.parametrize("place", ["a folder", "the hub"])
@pytest.mark.parametrize("name", DEADLY)
def test_no_tokenizer_file_ends_the_process(tmp_path, monkeypatch, name, place):
    changes, problem = DEADLY[name]
    folder: Path | str = tmp_path
    if place == "the hub":
        sized(monkeypatch, constants, HF_HUB_OFFLINE=True, HF_HUB_CACHE=str(tmp_path))
        cache, folder = tmp_path / "models--someone--words", "someone/words"
        tmp_path = cache / "snapshots" / "c0ffee"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text(tmp_path.name)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    of_settings = {"tokenizer_class", "chat_template"} & changes.keys()
    path = tmp_path / ("tokenizer_config.json" if of_settings else "tokenizer.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with refused(problem):
        load_tokenizer(folder)


def test_no_tokenizer_splits_words_by_chance(tmp_path, caplog):
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text())
    parts["model"]["dropout"] = 0.5
    path.write_text(json.dumps(parts))
    tokenizer = load_tokenizer(tmp_path)
    assert {tuple(tokenizer("The sea was calm.")["input_ids"]) for _ in range(20)} == {
        tuple(make_tokenizer()("The sea was calm.")["input_ids"])
    }
    assert "leaves out merges by chance (dropout 0.5): switched off" in caplog.text
    ByT5Tokenizer(sp_model_kwargs={"enable_sampling": True}).save_pretrained(tmp_path / "pieces")
    with pytest.raises(InputError, match="splits words by chance: take enable_sampling out"):
        load_tokenizer(tmp_path / "pieces")


def test_ids_outside_the_vocabulary_are_refused_with_their_place(tmp_path):
    tokenizer = make_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "The sea was calm."}])
    worst = max(tokenizer("The sea was calm.")["input_ids"])
    with pytest.raises(InputError, match=rf"a.jsonl:2: token id {worst} .* vocabulary of {worst}"):
        open_text(path, tmp_path, vocab_size=worst)
    assert len(open_text(path, tmp_path, vocab_size=worst + 1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequence_length": 1}, "sequence_length is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"tokenizer": "no eos"}, "no end-of-sequence token"),
    ],
)
def test_unusable_settings_are_refused(tmp_path, options, problem):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "The sea"}])
    if "tokenizer" in options:
        options = {"tokenizer": make_tokenizer(eos=None)}
    with pytest.raises(InputError, match=problem):
        open_text(path, tmp_path, **options)


# The demo's corpus and tokenizer: found beside the interpreter, the same every time.


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus(max_bytes=600_000)


def test_the_tokenizer_is_lossless_compact_and_reproducible(corpus, tmp_path):
    tokenizer = train_bpe_tokenizer(corpus, 1000, tmp_path / "a")
    train_bpe_tokenizer([str(path) for path in corpus], 1000, tmp_path / "b")
    assert len(tokenizer) == 1000
    saved = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "ab"]
    assert saved[0] == saved[1]
    loaded = load_tokenizer(tmp_path / "a")
    text = corpus[0].read_text() + "\n\tnaïve ☕ \r\n"
    ids = loaded(text)["input_ids"]
    assert loaded.decode(ids) == text == tokenizer.decode(tokenizer(text)["input_ids"])
    assert len(ids) < len(text) / 2
    assert (loaded.eos_token, loaded.pad_token) == (END_OF_TEXT, PADDING)
    assert loaded.eos_token_id != loaded.pad_token_id

    data = open_dataset(corpus, kind="text", tokenizer=loaded, sequence_length=128,
                        cache_dir=tmp_path, vocab_size=1000)  # fmt: skip
    assert data.fill > 0.99 and data.num_tokens > 100_000
