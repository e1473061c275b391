"""Files that are copied with a model's weights: tokenizer, templates, code, licence.

These files stay valid when the weights are trained. Other formats of the weights, indices, files of
a trainer, and READMEs, which describe the source, do not.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from megatrain.base.json_yaml import parse_json, read_json
from megatrain.base.units import MIB
from megatrain.errors import InputError, explained, in_one_line

Companions = Mapping[str, bytes]  # by path inside the folder

GENERATION = "generation_config.json"

_MOST_BYTES = 256 * MIB  # of all files; the largest known tokenizers have 34 MB
_TEMPLATES = "additional_chat_templates"
_GENERATE = "custom_generate"  # code that `model.generate` of transformers runs
# sentence-transformers' files: the modules of a model, and how it pools tokens' hidden states.
_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_TEXTS = "sentence_bert_config.json"

# Names of files that are copied, unless `_NOT_COPIED` matches them as well.
_COPIED = re.compile(
    r"[^/]+\.(json|jinja|txt|model(\.v\w+)?|tiktoken|bpe|spm|vocab|py)"
    rf"|{_TEMPLATES}/[^/]+\.jinja|{_POOLING}|{_GENERATE}/[^/]+\.(py|txt)"
    r"|(licen[cs]e|notice|copying|copyright|use_policy|acceptable_use)[^/]*",
    re.IGNORECASE,
)
_NOT_COPIED = re.compile(
    r"\..*|config\.json|.*\.index\.json|adapter_config\.json|(hf_)?quant\w*_config\.json|readme.*"
    r"|requirements.*|trainer_state\.json|training_args.*|.*_results\.json",
    re.IGNORECASE,
)
_TOKENIZER = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|tekken\.json"
    rf"|normalizer\.json|chat_template.*|{_TEMPLATES}/.*|.*\.(model|tiktoken|bpe|spm|vocab)"
)

log = logging.getLogger(__name__)


def companions(folder: Path) -> dict[str, bytes]:
    """The files of a model's folder that are copied with its weights.

    Python files beside the weights are among them only if a configuration names code (`auto_map`).

    Raises InputError: a file cannot be read.
    """
    paths = [*folder.iterdir()]
    for pattern in (f"{_TEMPLATES}/*", _POOLING, f"{_GENERATE}/*"):
        paths += folder.glob(pattern)
    chosen: dict[str, Path] = {}
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        fits_checkpoints = name.isprintable() and "\\" not in name
        if fits_checkpoints and _COPIED.fullmatch(name) and not _NOT_COPIED.fullmatch(name):
            chosen[name] = path
    code = {name: chosen.pop(name) for name in list(chosen) if re.fullmatch(r"[^/]+\.py", name)}
    files, configuration = read_files(chosen), read_files({"config.json": folder / "config.json"})
    needs_code = any(b'"auto_map"' in data for data in [*configuration.values(), *files.values()])
    return files | (read_files(code) if needs_code else {})


def sentence_files(beside: Companions, width: int, pooling: str) -> dict[str, bytes]:
    """The files that let sentence-transformers pool as in training; empty if `beside` has them."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    mode = "mean_tokens" if pooling == "mean" else "lasttoken"
    with explained(f"{_TEXTS}: malformed"):
        lowers_case = parse_json(beside.get(_TEXTS, b"{}")).get("do_lower_case")
    if lowers_case:
        raise InputError(
            f"{_TEXTS}: do_lower_case would change texts before they are tokens, which training "
            "does not; write the data in lower case, and set it to false"
        )
    if _MODULES in beside:
        with explained(f"{_MODULES}, {_POOLING}: malformed"):
            module_kinds = {str(m["type"]).rpartition(".")[2] for m in parse_json(beside[_MODULES])}
            settings = parse_json(beside.get(_POOLING, b"{}"))
            switched_on = [key for key, value in settings.items() if value is True]
            modes = {key.removeprefix("pooling_mode_") for key in switched_on} - {"include_prompt"}
            modes.add(settings.get("pooling_mode", mode))
        if module_kinds <= kinds.keys() and modes <= {mode, mode.removesuffix("_tokens")}:
            return {}
        raise InputError(
            f"{_MODULES}, {_POOLING}: a text's embedding is another one than is trained (pooling "
            f"{pooling}, only {', '.join(kinds)}); set loss.pooling, or remove these files"
        )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    pools = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": False}
    files = {_MODULES: modules, _POOLING: pools | {f"pooling_mode_{mode}": True}}
    return {name: json.dumps(value, indent=2).encode() for name, value in files.items()}


def read_files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    """The bytes of files, by name; files beyond `_MOST_BYTES` in all are only named in the log."""
    contents: dict[str, bytes] = {}
    bytes_left = _MOST_BYTES
    for name, path in paths.items():
        if not path.is_file():
            continue
        with explained(f"{path}: cannot be read", of=OSError):
            if (size := path.stat().st_size) <= bytes_left:
                contents[name] = path.read_bytes()
                bytes_left -= size
            else:
                log.warning("%s: does not go along with the model: %d MiB", path, size // MIB)
    return contents


def write_companions(folder: Path, files: Companions) -> None:
    """Write all of `files` into a folder."""
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # it may be a link to another folder's file
        target.write_bytes(data)


def set_generation(model: PreTrainedModel, files: Companions) -> None:
    """Set a model's generation_config from its companions, if they have one."""
    if (data := files.get(GENERATION)) is None or not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig(**parse_json(data))
    except Exception as error:  # transformers raises many types, one for each check
        log.warning("%s is left aside: %s", GENERATION, in_one_line(error, 200))


def add_ends(folder: Path, ends: Sequence[int]) -> None:
    """Add these tokens to those that end texts in the generation settings of a model's folder."""
    path = folder / GENERATION
    settings = read_json(path) if ends and path.is_file() else {}
    old_ends = settings.get("eos_token_id")
    if not isinstance(old_ends, list):
        old_ends = [] if old_ends is None else [old_ends]
    all_ends = list(dict.fromkeys([*ends, *old_ends]))
    if settings and all_ends != old_ends:
        settings["eos_token_id"] = all_ends if len(all_ends) > 1 else all_ends[0]
        path.unlink()  # it may be a link to another folder's file
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """The files of a model's folder that belong to its tokenizer, chat templates included."""
    for path in sorted([*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")]):
        if path.is_file() and _TOKENIZER.fullmatch(path.relative_to(folder).as_posix()):
            yield path
