"""The data of a run file, tokenised."""

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatrain.base.whole_files import user_cache
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
from megatrain.errors import InputError
from megatrain.model.build import load_config
from megatrain.model.sizes import check_sequence_length
from megatrain.model.weights import resolve_model
from megatrain.train.resolve_model import ResolvedModel, model_config

log = logging.getLogger(__name__)


def open_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    images: ImageProcessor | None = None,
) -> tuple[PackedDataset | Prompts, dict[str, PackedDataset | Prompts]]:
    """Training rows, and evaluation rows by name: from separate files, or held out.

    A single evaluation set's name is empty.

    Args: `images`: the model's processor of images.

    Raises InputError: the data cannot be used.
    """
    data = config.data
    reading: dict[str, Any] = dict(
        tokenizer=tokenizer,
        fields=data.fields,
        bad_rows=data.bad_rows,
        seed=config.training.seed,
        vocab_size=vocab_size,
        hub_config=data.hub_config,
        hub_split=data.hub_split,
    )

    def opened(path: Any, **mixing: Any) -> PackedDataset | Prompts:
        if config.loss.kind == "prompts":
            longest = data.sequence_length - (config.loss.max_completion_length or 0)
            drop, chat = data.overlong == "drop", data.kind == "chat"
            return open_prompts(path, longest=longest, drop=drop, chat=chat, **reading)
        return open_dataset(
            path,
            kind=config.loss.kind or data.kind,
            cache_dir=data.cache_dir or user_cache("tokens"),
            images=images,
            sequence_length=data.sequence_length,
            packing=data.packing,
            overlong=data.overlong,
            labels=config.loss.labels or (),
            lines=config.loss.lines,
            **reading,
            **mixing,
        )

    sets: dict[str, Any] = {name: opened(path) for name, path in data.eval_sets.items()}
    training: Any
    if config.loss.kind == "prompts":
        training = opened(data.path)
    else:
        training = opened(data.path, weights=data.weights, repeat=data.repeat)
    if not sets and data.eval_fraction:
        training, sets[""] = training.hold_out(data.eval_fraction)
    return training, sets


def run_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with the run's chat template and end token."""
    trusted = model.trust_remote_code
    tokenizer = load_tokenizer(model.tokenizer or str(model.path), trust_remote_code=trusted)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(Path(model.chat_template).expanduser())
    if model.eos_token is not None:
        if model.eos_token not in tokenizer.get_vocab():
            known = [str(token) for token in tokenizer.added_tokens_decoder.values()]
            near = nearest(model.eos_token, known)
            raise InputError(f"model.eos_token: no token {model.eos_token!r}{near}")
        tokenizer.eos_token = model.eos_token
    return tokenizer


def run_images(model: ModelSection) -> ImageProcessor:
    """The processor of images of a run's model."""
    folder = None if model.path is None else resolve_model(model.path)
    return ImageProcessor(folder, trust_remote_code=model.trust_remote_code)


def run_ends(
    model: ModelSection, tokenizer: PreTrainedTokenizerBase, training: PackedDataset | Prompts
) -> list[int]:
    """The tokens that end the taught texts and that the model does not know as ends yet."""
    ends = [] if model.eos_token is None else [tokenizer.eos_token_id]
    of_replies = training.kind in ("chat", "pairs", "prompts")
    if of_replies and tokenizer.chat_template:  # completions need none
        if (turn := end_of_turn(tokenizer)) is None:
            log.info("no token of the chat template ends a reply: the model will not know its end")
        else:
            ends.append(turn)
    return list(dict.fromkeys(ends))


def data_alone(
    config: Config,
) -> tuple[PreTrainedTokenizerBase, PackedDataset, dict[str, PackedDataset]]:
    """Tokenizer, training and evaluation rows of a run, without the model's weights."""
    model = ResolvedModel.of(config.model).section
    trusted = model.trust_remote_code
    tokenizer = run_tokenizer(model)
    if model.path is None:
        hf_config = model_config(model, tokenizer)
    else:
        hf_config = load_config(Path(model.path).expanduser(), trust_remote_code=trusted)
    check_sequence_length(hf_config, config.data.sequence_length)
    vocab_size = hf_config.get_text_config(decoder=True).vocab_size
    evaluation: Any  # as training
    training, evaluation = open_data(config, tokenizer, vocab_size, run_images(model))
    if isinstance(training, Prompts):
        raise InputError(f"loss.name {config.loss.name}: prompts have no tokens to learn to show")
    return tokenizer, training, evaluation
