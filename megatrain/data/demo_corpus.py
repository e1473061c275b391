"""Real text without a download: the Python standard library, and a tokenizer trained on it."""

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import PreTrainedTokenizerFast

from megatrain.errors import InputError, explained

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
_ALPHABET = 256  # each byte is a token
# Folders beside the library's own code: installed packages, tests, tables, old programs.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idle_test",
    "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


def stdlib_corpus(max_bytes: int | None = None) -> list[Path]:
    """The source files of the standard library beside the running interpreter, sorted by path.

    Several megabytes of real code. With `max_bytes`, the first files that fit in it.

    Raises InputError: this Python came without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in _LEFT_OUT and not n.startswith("config-")]
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    chosen: list[Path] = []
    total = 0
    for path in sorted(paths):
        size = path.stat().st_size
        if size and (max_bytes is None or total + size <= max_bytes):
            chosen.append(path)
            total += size
    if not chosen:
        raise InputError(f"{root}: no sources there: use a Python with its library's .py files")
    return chosen


def train_bpe_tokenizer(
    files: Sequence[str | Path], vocab_size: int, folder: str | Path
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on text files, and save it in `folder`.

    The same files always give the same tokenizer. `END_OF_TEXT` ends documents, and is the prompt
    when a model generates without one; `PADDING` fills rows.

    Raises InputError: the vocabulary is too small for all bytes, or a file cannot be read.
    """
    special = [END_OF_TEXT, PADDING]
    if vocab_size < _ALPHABET + len(special):
        raise InputError(
            f"vocab_size is {vocab_size}: a byte-level tokenizer needs {_ALPHABET + len(special)}"
        )
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(map(_read, files), vocab_size, 0, False, special, len(files))
    trained = Tokenizer.from_str(model.to_str())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def _read(path: str | Path) -> str:
    with explained(f"{path}: cannot be read as text", of=(OSError, UnicodeDecodeError)):
        return Path(path).read_text(encoding="utf-8")
