"""Loads a tokenizer, and checks texts and the ids that it gives."""

import hashlib
import json
import logging
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatrain.base.json_yaml import read_json, read_text
from megatrain.base.units import MIB
from megatrain.compat.gguf import is_gguf, unpacked_folder
from megatrain.data.row_packing import Ints
from megatrain.errors import InputError, in_one_line


def load_tokenizer(
    path_or_id: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of a Hugging Face folder, GGUF file or hub id, without dropout of its merges.

    Raises InputError: there is none, it is broken, or it would run code that came with it.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    folder = Path(path_or_id).expanduser()
    folder = unpacked_folder(folder) if is_gguf(folder) else folder
    local = folder.exists() or str(path_or_id).startswith(("/", ".", "~"))
    if local and not folder.is_dir():
        raise InputError(f"{path_or_id}: no such folder; check the path")
    if local and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputError(f"{folder}: no tokenizer in this folder: copy its tokenizer.json there")
    name = str(folder if local else path_or_id)
    remedy = "check the files" if local else "check the name, or fetch it once with a network"
    with tokenising(f"cannot load a tokenizer from {str(path_or_id)!r}", remedy):
        if not local:
            files = [*_VOCABULARIES, *_SETTINGS]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
        _refuse_endless(folder)
        for file in _SETTINGS:
            if (folder / file).exists():  # refuses a key that is there twice
                read_json(folder / file)
        for file in _VOCABULARIES:
            _refuse_aborting(folder / file)
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    kind, template = type(tokenizer).__name__, getattr(tokenizer, "chat_template", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or len(tokenizer) == 0:
        raise InputError(f"{path_or_id}: a {kind} is not one tokenizer, or empty: check its files")
    templates = template.values() if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in templates):
        raise InputError(f"{path_or_id}: the tokenizer's chat_template is no text: correct it")
    _stop_sampling(tokenizer, path_or_id)
    return tokenizer


def _stop_sampling(tokenizer: Any, path_or_id: str | Path) -> None:
    """Switch off dropout of merges: the same text must always give the same tokens."""
    if not tokenizer.is_fast:
        if (tokenizer.init_kwargs.get("sp_model_kwargs") or {}).get("enable_sampling"):
            raise InputError(
                f"{path_or_id}: the tokenizer splits words by chance: take enable_sampling out of "
                "sp_model_kwargs in its tokenizer_config.json"
            )
        return
    model = tokenizer.backend_tokenizer.model
    if dropout := getattr(model, "dropout", None):
        model.dropout = None
        logging.getLogger("megatrain.data").warning(
            "%s: the tokenizer leaves out merges by chance (dropout %g): switched off, as the same "
            "text must give the same tokens again", path_or_id, dropout,
        )  # fmt: skip


def read_template(path: Path) -> str:
    """The chat template in a file. Raises InputError: it cannot be read, or is no text."""
    text = read_text(path, _LARGEST_TEMPLATE)
    if not text.strip():
        raise InputError(f"{path}: the file is empty: name a Jinja template")
    return text


@contextmanager
def tokenising(where: str, remedy: str = "check the tokenizer's files") -> Iterator[None]:
    """Within this context a tokenizer's failures become an InputError with the remedy."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        # The Rust library raises bare Exceptions, or panics, which are no Exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{where}: {in_one_line(error, 300)} ({remedy})") from error


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_TEXTS = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_VOCABULARIES = ("tokenizer.json", "vocab.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_LARGEST_TEMPLATE = 4 * MIB
_LARGEST_ID = 1 << 24  # 60 times the largest vocabulary
_LARGEST_BYTES = 512 * MIB  # the largest of these files that is known has 34 MB


def _refuse_endless(folder: Path) -> None:
    """Refuse pipes and huge files, which transformers would read to their end."""
    for path in folder.iterdir():
        if path.suffix in _TEXTS and path.exists():
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
                limit = _LARGEST_BYTES // MIB
                raise InputError(f"{path}: not a plain file of at most {limit} MiB: replace it")


def _refuse_aborting(path: Path) -> None:
    """Raises InputError: a file would make the Rust library abort the process.

    The library allocates memory for all ids below the largest, and cuts a prefix off all tokens.
    """
    try:
        tree = json.loads(path.read_bytes())
        model = {"vocab": tree} if path.name == "vocab.json" else tree["model"]
        added = [token["id"] for token in tree.get("added_tokens") or ()]
        vocab = model["vocab"]
        largest = max([0, *added, *(vocab.values() if isinstance(vocab, dict) else ())])
        prefix, merges = model.get("continuing_subword_prefix") or "", model.get("merges") or ()
        right_parts = [(m.split(" ") if isinstance(m, str) else m)[1] for m in merges if prefix]
        lacking = next((part for part in right_parts if not part.startswith(prefix)), None)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return  # the library reports a missing or malformed file
    if largest > _LARGEST_ID:
        raise InputError(f"{path}: token id {largest} is too large: replace the file")
    if lacking is not None:
        raise InputError(f"{path}: a merge with {lacking!r:.40} lacks {prefix!r:.40}: replace it")


def identity(tokenizer: Any) -> str:
    """A digest that is the same for tokenizers that give the same ids for every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, model, tokenizer.chat_template,
             tokenizer.special_tokens_map, tokenizer.all_special_ids]  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def placed_tokens(tokenizer: Any, text: str, where: str) -> tuple[list[int], Ints]:
    """The ids of a text, and each token's begin and end in it: [n, 2].

    Raises InputError: the tokenizer fails or has no offsets; the text cannot be encoded.
    """
    check_encodable(text, where)
    if not tokenizer.is_fast:
        raise InputError("replies need a tokenizer with a tokenizer.json (a fast one): convert it")
    with tokenising(where):
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    return encoded["input_ids"], np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)


def token_ids(ids: Sequence[int], vocab_size: int | None, where: str) -> NDArray[np.int32]:
    """A tokenizer's ids in stored form: int32 [tokens].

    Raises InputError: an id is beyond the model's embeddings, or too large for any model.
    """
    numbers = np.array(ids, dtype=np.int64)
    worst, size = int(numbers.max(initial=0)), vocab_size or 1 << 31
    if worst >= size:
        raise InputError(
            f"{where}: token id {worst} is outside the model's vocabulary of {size}: use the "
            "tokenizer that belongs to the model"
        )
    return numbers.astype(np.int32)


def first_token(
    text: str, offsets: Ints, ids: Sequence[int] | NDArray[np.int32], added: set[int], begin: int
) -> int:
    """The number of the first token with a part of text[begin:]; the number of tokens if none has.

    An added token that begins earlier does not count if it has only white space of text[begin:].

    Args: `offsets`: `[n, 2]`: begin and end of each token in the text.
    """
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    if first < len(ids) and int(ids[first]) in added:
        start, end = offsets[first].tolist()
        return first + bool(text[start:begin].strip() and not text[begin:end].strip())
    return first


def check_encodable(text: str, where: str) -> None:
    """Raises InputError: the text has half of a surrogate pair, which JSON can write."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: a lone surrogate escape (\\ud8..): not text, fix it") from error


def pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """An id of the model's vocabulary to fill rows with; it is never learnt."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and (vocab_size is None or candidate < vocab_size):
            return int(candidate)
    return 0
