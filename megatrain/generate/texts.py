"""From prompts to texts: batches of prompts through transformers' own `generate`."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from megatrain.data.prompts import Prompt, end_of_turn, prompt_ids
from megatrain.data.tokenizer import pad_id, tokenising
from megatrain.errors import DoesNotFit, InputError
from megatrain.generate.models import (
    TextModel,
    cache_bytes,
    check_cache,
    heeds_mask,
    takes_cache,
)
from megatrain.generate.sampling import OnlyNumbers, Sampling, drawn_apart
from megatrain.parallel.distributed import ALONE

log = logging.getLogger(__name__)


def generate(
    source: TextModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    batch_size: int = 16,
    streamer: Any = None,
) -> list[str]:
    """The model's continuation of each prompt, without the prompt and special tokens.

    Where weights are streamed, all prompts of a batch share each pass over them.

    Args:
        source: an engine (also one in training: its state is not changed), or a resident model.
        prompts: texts to continue, and messages to reply to.
        sampling: None: the model's own settings.
        batch_size: prompts that are continued together.
        streamer: transformers' streamer, which gets each new token; for a single prompt.

    Raises:
        InputError: a prompt that cannot be used, or leaves no room in the model's context.
        DoesNotFit: no memory for the keys and values of a batch.
    """
    sampling = sampling or Sampling()
    config = source.config.get_text_config(decoder=True)
    ids = [
        prompt_ids(tokenizer, prompt, config.vocab_size, f"prompt {number}")
        for number, prompt in enumerate(prompts, 1)
    ]
    chat = any(not isinstance(prompt, str) for prompt in prompts)
    stops, of_model = stop_ids(source, tokenizer, chat=chat), source.generation_config
    pad = pad_id(tokenizer, config.vocab_size)
    rows = continued(
        source,
        ids,
        sampling,
        of_model,
        stops=stops,
        pad=pad,
        batch_size=batch_size,
        tokenizer=tokenizer,
        streamer=streamer,
    )
    with tokenising("the new tokens"):
        return tokenizer.batch_decode(
            [row[:-1] if row[-1:] and row[-1] in stops else row for row in rows],
            skip_special_tokens=True,
        )


def continued(
    source: TextModel,
    ids: Sequence[Sequence[int]],
    sampling: Sampling,
    of_model: GenerationConfig,
    *,
    stops: set[int],
    pad: int,
    batch_size: int,
    apart: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to the first of `stops`, which is one of them.

    Args:
        source, sampling, batch_size, streamer: as of `generate`.
        ids: the tokens of each prompt.
        of_model, stops, pad: as of `Sampling.settings`.
        apart: tokens drawn for a prompt follow from the seed and its place in `ids` alone, so
            that several ranks share a batch. `of_model` has no sampling settings then.
        tokenizer: for `of_model.stop_strings`.
    """
    limit, share = _room(source, ids, sampling.max_new_tokens), source.ranks if apart else ALONE
    out: dict[int, list[int]] = {}
    longest = max(map(len, ids), default=0) + sampling.max_new_tokens
    at_once, device = -(-min(batch_size, len(ids)) // share.size), source.device.torch_device
    with _running(source, at_once, longest, apart=apart) as model, _set(model, of_model):
        if not apart:
            torch.manual_seed(sampling.seed)
        for rows in _batches(source, model, ids, batch_size):
            count = -(-len(rows) // share.size)
            mine = rows[share.rank * count :][:count]
            padded = mine + rows[:1] * (count - len(mine))  # as many as any rank's
            width = max(len(ids[row]) for row in rows)
            room = min(sampling.max_new_tokens, limit - width)
            source.ranks.agree(
                partial(check_cache, source.device, model, len(padded), width + room)
            )
            settings = sampling.settings(
                of_model, room=room, stops=stops, pad=pad, cached=takes_cache(model)
            )
            extras: dict[str, Any] = {}
            if apart:
                extras = drawn_apart(settings, sampling.seed, padded, len(mine), share, device)
            extras["logits_processor"] = [OnlyNumbers(), *extras.get("logits_processor", ())]
            batch = _padded([ids[row] for row in padded], width, pad, device)
            output = model.generate(
                **batch,
                **extras,
                generation_config=settings,
                tokenizer=tokenizer,
                streamer=streamer,
            )
            new = output.sequences[: len(mine), width:].tolist()
            for row, tokens in zip(mine, new, strict=True):
                ends = (at for at, token in enumerate(tokens, 1) if token in stops)
                out[row] = tokens[: next(ends, len(tokens))]
    every = {row: new for shared in share.all_gather_object(out) for row, new in shared.items()}
    return [every[row] for row in range(len(ids))]


def _batches(
    source: TextModel, model: PreTrainedModel, ids: Sequence[Sequence[int]], batch_size: int
) -> list[list[int]]:
    """Batches of rows: in their order, of equal lengths where padding would change results."""
    every = list(range(len(ids)))
    parts = [every]
    uneven = batch_size > 1 and len({len(row) for row in ids}) > 1
    if uneven and not all(source.ranks.all_gather_object(heeds_mask(model))):
        log.info("padding would change what this model says: only prompts of one length share")
        of_length = defaultdict(list)
        for row in every:
            of_length[len(ids[row])].append(row)
        parts = list(of_length.values())
    return [p[at : at + batch_size] for p in parts for at in range(0, len(p), batch_size)]


@contextmanager
def _running(
    source: TextModel, rows: int, tokens: int, *, apart: bool = False
) -> Iterator[PreTrainedModel]:
    """The model for rows of this length; its weights are on the device if they fit beside it.

    Args: `apart`: each of several ranks has rows of its own.
    """
    try:
        with source.whole_model() as model:
            cached = cache_bytes(model, rows, tokens)
        with source.whole_model(spare=cached, apart=apart) as model:
            yield model
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            "the device has no memory left; take fewer prompts at once, or shorter ones"
        ) from error


@contextmanager
def _set(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Within this context the model has these settings and no loss of routers."""
    before, model.generation_config = model.generation_config, settings
    configs = (model.config, model.config.get_text_config(decoder=True))
    asking = [config for config in configs if getattr(config, "output_router_logits", False)]
    for config in asking:  # with a cache it gets one token and the mask of all
        config.output_router_logits = False
    try:
        yield
    finally:
        model.generation_config = before
        for config in asking:
            config.output_router_logits = True


def stop_ids(source: TextModel, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> set[int]:
    """The tokens that end a text: the model's, the tokenizer's, in a chat also the template's."""
    eos = source.generation_config.eos_token_id
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
    if chat:
        ends.add(end_of_turn(tokenizer))
    return {end for end in ends if end is not None}


def _room(source: TextModel, ids: Sequence[Sequence[int]], wanted: int) -> int:
    """The longest possible row. Raises InputError: a prompt leaves no room for any token."""
    config = source.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None or limit < 1 or not ids:
        return sys.maxsize
    number, longest = max(enumerate(map(len, ids), 1), key=lambda pair: pair[1])
    problem = f"prompt {number}: {longest} tokens leave"
    if longest >= limit:
        raise InputError(f"{problem} no room in a context of {limit}; shorten it")
    if longest + wanted > limit:
        room = limit - longest
        log.warning(
            "%s room for %d new ones in a context of %d, not %d", problem, room, limit, wanted
        )
    return limit


def _padded(
    rows: Sequence[Sequence[int]], width: int, pad: int, device: torch.device
) -> dict[str, Tensor]:
    """Token ids `[B, width]` with padding on the left, and the mask that tells it apart."""
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
