"""The demo's corpus and tokenizer: found beside the interpreter, the same every time."""

import pytest

from megatrain.data import load_tokenizer, open_dataset, stdlib_corpus, train_bpe_tokenizer
from megatrain.data.demo_corpus import END_OF_TEXT, PADDING


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus(max_bytes=600_000)


def test_the_corpus_is_megabytes_of_the_library_itself():
    files = stdlib_corpus()
    assert files == sorted(set(files))
    assert 4e6 < sum(f.stat().st_size for f in files) < 3e7
    names = {f.name for f in files}
    assert {"argparse.py", "typing.py"} <= names
    folders = {part for f in files for part in f.parts[-3:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "__pycache__"}


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
