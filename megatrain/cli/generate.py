"""Sampling from a model whose layers are streamed through the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from megatrain.api import Engine
from megatrain.checkpoint import Checkpoint
from megatrain.data import load_tokenizer
from megatrain.data.tokenizer import tokenising
from megatrain.errors import InputError
from megatrain.model.weights import resolve_model
from megatrain.train.trained import trained_model


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; a temperature of 0 takes the likeliest one."""

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


def generate_from(
    model: str,
    prompt: str,
    sampling: Sampling,
    device: str,
    precision: Literal["bf16", "fp32"],
) -> None:
    """Load `model` for inference only and print `prompt` and its continuation as it comes.

    Raises:
        InputError: no such model, or the prompt leaves no room in the model's context.
    """
    source = trained_model(model)
    if isinstance(source, str):
        resolve_model(source)  # first: of a misspelt folder it is not the tokenizer that is missing
    tokenizer = load_tokenizer(source.model_folder if isinstance(source, Checkpoint) else source)
    engine = Engine(
        source,
        optimizer=None,
        precision=precision,
        device=None if device == "auto" else device,
    )
    try:
        print_continuation(engine, tokenizer, prompt, sampling)
    finally:
        engine.close()


def print_continuation(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompt: str, sampling: Sampling
) -> None:
    """Print `prompt` and what the model continues it with, word by word."""
    with tokenising("the prompt"):
        ids = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    streamer.put(torch.tensor(ids))
    ends = _end_tokens(engine, tokenizer)
    for token in continue_tokens(engine, ids, sampling):
        if token in ends:
            break
        streamer.put(torch.tensor([token]))
    streamer.end()


def _end_tokens(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> set[int | None]:
    """The tokenizer's end token, and those of the configuration: none, one or a list."""
    ends = getattr(engine.config.get_text_config(decoder=True), "eos_token_id", None)
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


def continue_tokens(engine: Engine, ids: list[int], sampling: Sampling) -> Iterator[int]:
    """New token ids, each from one forward pass over all tokens so far.

    Raises:
        InputError: an empty prompt, or one as long as the model's context.
    """
    if not ids:
        raise InputError("--prompt: holds no token")
    limit = getattr(engine.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and len(ids) >= limit:
        raise InputError(f"--prompt: {len(ids)} tokens leave no room in a context of {limit}")
    generator = torch.Generator().manual_seed(sampling.seed)
    room = sampling.max_new_tokens if limit is None else limit - len(ids)
    tokens = list(ids)
    for _ in range(min(room, sampling.max_new_tokens)):
        logits_BTV = engine.logits({"input_ids": torch.tensor([tokens])})
        tokens.append(draw(logits_BTV[0, -1], sampling, generator))
        yield tokens[-1]


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id by temperature and nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751)."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V - logits_V.max()).double() / sampling.temperature  # never above 0
    probabilities, ids = torch.softmax(scaled_V, -1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities[(before >= sampling.top_p) & (before > 0)] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
