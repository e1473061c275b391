"""The model that a run file names, resolved once, its tokenizer and the run's data."""

import hashlib
import json
import logging
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from megatrain.base.whole_files import file_fingerprint, user_cache
from megatrain.checkpoint import Checkpoint, is_checkpoint, open_checkpoint, whole_checkpoints
from megatrain.config import Config, ModelSection, nearest
from megatrain.data import (
    ImageProcessor,
    PackedDataset,
    Prompts,
    load_tokenizer,
    open_dataset,
    open_prompts,
)
from megatrain.data.prompts import end_of_turn
from megatrain.data.tokenizer import read_template
from megatrain.errors import InputError, explained
from megatrain.model.build import load_config
from megatrain.model.companions import tokenizer_files
from megatrain.model.sizes import check_sequence_length
from megatrain.model.weights import resolve_model
from megatrain.run_folder import layout
from megatrain.source.source import adapter_folder, folder_adapter

log = logging.getLogger(__name__)
_COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def trained_model(run: str) -> Checkpoint | str:
    """A run's finished model, else its newest whole checkpoint.

    A checkpoint is opened; a model folder or hub id is returned unchanged. The log names damaged
    checkpoints, and a state that is newer than the finished model.
    """
    path = Path(run).expanduser()
    if is_checkpoint(path):
        return open_checkpoint(path)
    if not (path / layout.MODEL).exists():
        saved = whole_checkpoints(path / layout.CHECKPOINTS, partial(log.warning, "not used: %s"))
        if saved:
            log.info("the run has not ended: this is %s", saved[0])
            return open_checkpoint(saved[0])
    done, steps = layout.ending(path).done, layout.checkpoints(path)
    if done is not None and steps and steps[-1] > done:
        log.warning(
            "%s is of step %d; the run has gone on: its newest state is %s",
            path / layout.MODEL, done, layout.checkpoint_folder(path, steps[-1]),
        )  # fmt: skip
    if layout.holds_model(path / layout.MODEL):
        return str(path / layout.MODEL)
    if not (path / "config.json").is_file():
        for config in sorted(path.glob(f"*/{layout.CONFIG}")):
            raise InputError(f"{run}: a folder of runs; name one of them, such as {config.parent}")
    return run


@dataclass(frozen=True)
class ResolvedModel:
    """The model that `model` of a run file names: a run, a checkpoint, a folder or a hub id."""

    # its path is the folder of configuration and tokenizer; for an adapter that of the base, and
    # `tokenizer` is then the adapter's folder, if that has one
    section: ModelSection
    # the source for `Engine`; None: the run file writes out a configuration
    source: Checkpoint | str | None
    weights: bool = True  # as `resolve_model` takes it

    @classmethod
    def of(cls, section: ModelSection, *, weights: bool = True) -> Self:
        """Resolve a section. Raises InputError: a checkpoint cannot be used."""
        if section.path is None:
            return cls(section, None, weights)
        source = trained_model(section.path)
        adapter = None if isinstance(source, Checkpoint) else adapter_folder(source)
        if adapter is not None:
            base = cls.of(section.model_copy(update={"path": folder_adapter(adapter)[1]}))
            files = section.tokenizer or (str(adapter) if any(tokenizer_files(adapter)) else None)
            return cls(base.section.model_copy(update={"tokenizer": files}), source, weights)
        folder = str(source.model_folder) if isinstance(source, Checkpoint) else source
        return cls(section.model_copy(update={"path": folder}), source, weights)

    @property
    def for_engine(self) -> Checkpoint | PreTrainedConfig | str:
        """The source for `Engine`. Raises InputError: a written-out configuration is wrong."""
        return deepcopy(self.config) if self.source is None else self.source

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration of `model.path`, or the one written out in `model.config`.

        Raises InputError: it cannot be read, or has unknown fields or impossible values.
        """
        section = self.section
        if section.config is not None:
            return _written_out(dict(section.config), self.tokenizer)
        assert section.path is not None
        folder = resolve_model(section.path, weights=self.weights)
        return load_config(folder, trust_remote_code=section.trust_remote_code)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The part of the configuration for text."""
        return self.config.get_text_config(decoder=True)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the run's chat template and end token."""
        section = self.section
        name, trusted = section.tokenizer or str(section.path), section.trust_remote_code
        tokenizer = load_tokenizer(name, trust_remote_code=trusted)
        if section.chat_template is not None:
            tokenizer.chat_template = read_template(Path(section.chat_template).expanduser())
        if section.eos_token is not None:
            if section.eos_token not in tokenizer.get_vocab():
                tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]
                hint = nearest(section.eos_token, tokens)
                raise InputError(f"model.eos_token: no token {section.eos_token!r}{hint}")
            tokenizer.eos_token = section.eos_token
        return tokenizer

    @cached_property
    def images(self) -> ImageProcessor:
        """The image processor of an adapter's folder, if it has one, else of the model's."""
        path, trusted = self.section.path, self.section.trust_remote_code
        folder = None if path is None else resolve_model(path, weights=self.weights)
        adapters_processor, models_processor = (
            ImageProcessor(place, trust_remote_code=trusted)
            for place in (adapter_folder(self.section.tokenizer), folder)
        )
        same = adapters_processor.identity in ([], models_processor.identity)
        return models_processor if same else adapters_processor

    @cached_property
    def key(self) -> str:
        """A hash of the model's files: their names, sizes, times and samples of their bytes.

        The samples are a file's first MiB, with the names and places of its tensors, and 64 pages
        of the rest: to read all bytes would take as long as to read the model.

        Raises InputError: there is no such model, or a file cannot be read.
        """
        if self.section.path is None:
            return "drawn"
        folders = {resolve_model(self.section.path)}
        if isinstance(self.source, Checkpoint):
            folders.add(self.source.folder)
        elif self.source is not None and (folder := Path(self.source).expanduser()).is_dir():
            folders.add(folder)
        files = [
            [str(path.relative_to(folder)), *file_fingerprint(path)]
            for folder in sorted(folders)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        return hashlib.blake2b(json.dumps(files).encode(), digest_size=12).hexdigest()


def _written_out(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of `fields`, with the tokenizer's vocabulary size and special tokens."""
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, [str(name) for name in CONFIG_MAPPING])
        raise InputError(f"model.config.model_type: unknown type {model_type!r}{hint}")
    config_class = CONFIG_MAPPING[model_type]
    known_fields = sorted({*config_class().to_dict(), *config_class.attribute_map})
    for name, value in fields.items():
        if name not in known_fields:
            raise InputError(f"model.config.{name}: unknown field{nearest(name, known_fields)}")
        if name in _COUNTS and not (type(value) is int and value > 0):
            raise InputError(f"model.config.{name}: should be a positive integer, got {value!r}")
    derived = {name: getattr(tokenizer, name) for name in _SPECIAL}
    derived["vocab_size"] = len(tokenizer)
    # Each configuration class has its own checks, which raise errors of any type.
    with explained(f"model.config: not a {model_type} configuration"):
        return config_class(**(derived | fields))


def open_data(
    config: Config, model: ResolvedModel
) -> tuple[PackedDataset | Prompts, dict[str, PackedDataset | Prompts]]:
    """Open the training rows, and the evaluation rows (of separate files, or held out) by name.

    The name of a single evaluation set is empty. Raises InputError: the data cannot be used.
    """
    data = config.data
    options = data.model_dump(include={"fields", "bad_rows", "hub_config", "hub_split"})
    options |= {"tokenizer": model.tokenizer, "seed": config.training.seed}
    options |= {"vocab_size": model.text_config.vocab_size}
    layout_options = data.model_dump(include={"sequence_length", "packing", "overlong"})

    def open_rows(path: Any, **mix_options: Any) -> PackedDataset | Prompts:
        if config.loss.kind == "prompts":
            longest = data.sequence_length - (config.loss.max_completion_length or 0)
            drop, chat = data.overlong == "drop", data.kind == "chat"
            return open_prompts(path, longest=longest, drop=drop, chat=chat, **options)
        return open_dataset(
            path,
            kind=config.loss.kind or data.kind,
            cache_dir=data.cache_dir or user_cache("tokens"),
            images=model.images,
            labels=config.loss.labels or (),
            lines=config.loss.lines,
            **(options | layout_options | mix_options),
        )

    sets: dict[str, Any] = {name: open_rows(path) for name, path in data.eval_sets.items()}
    training: Any = open_rows(data.path, weights=data.weights, repeat=data.repeat)
    if not sets and data.eval_fraction:
        training, sets[""] = training.hold_out(data.eval_fraction)
    return training, sets


def run_ends(
    model: ModelSection, tokenizer: PreTrainedTokenizerBase, training: PackedDataset | Prompts
) -> list[int]:
    """Tokens that end the taught texts, to be added to the end tokens that the model knows."""
    ends = [] if model.eos_token is None else [tokenizer.eos_token_id]
    has_replies = training.kind in ("chat", "pairs", "prompts")
    if has_replies and tokenizer.chat_template:
        if (turn := end_of_turn(tokenizer)) is None:
            log.info("no token of the chat template ends a reply: the model will not know its end")
        else:
            ends.append(turn)
    return list(dict.fromkeys(ends))


def data_alone(
    config: Config,
) -> tuple[PreTrainedTokenizerBase, PackedDataset, dict[str, PackedDataset]]:
    """Tokenizer, training and evaluation rows of a run, without the model's weights."""
    model = ResolvedModel.of(config.model, weights=False)
    check_sequence_length(model.config, config.data.sequence_length)
    evaluation: Any  # data sets of the class of `training`
    training, evaluation = open_data(config, model)
    if isinstance(training, Prompts):
        raise InputError(f"loss.name {config.loss.name}: prompts have no labels to show")
    return model.tokenizer, training, evaluation
