"""Generates texts from batches of prompts, with transformers' own `generate`."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from megatrain.api import Engine
from megatrain.base.changed import changed
from megatrain.base.units import gib
from megatrain.compat.torch import pytree
from megatrain.data.images import ImageProcessor
from megatrain.data.prompts import Prompt, end_of_turn, prompt_ids
from megatrain.data.tokenizer import pad_id, tokenising
from megatrain.device import Device, free_bytes
from megatrain.errors import DoesNotFit, InputError, MegatrainError, in_one_line
from megatrain.generate.sampling import AllEnded, OnlyNumbers, OwnDraws, Sampling
from megatrain.model.media import as_computed, cache_of
from megatrain.model.sizes import most_tokens
from megatrain.parallel.distributed import ALONE

log = logging.getLogger(__name__)

# Short trials find the size of a model's cache, and if padding changes its logits.
_TRIAL_LENGTHS = (2, 3)  # tokens of the prompts whose caches are compared

Ids = Sequence[Sequence[int]]  # of prompts
# For each layer: bytes of a row's cache at both lengths, and the most tokens that it keeps.
_Layers = list[tuple[int, int, int | None]]
_caches: WeakKeyDictionary[PreTrainedModel, _Layers | None] = WeakKeyDictionary()
_PROMPT = (5, 7, 6, 9)  # ids that every vocabulary has
_PADDING = 3  # tokens of padding before the prompt
# Logits that differ by more than this share of their spread differ by more than rounding.
_ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_heeding: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def generate(
    source: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    batch_size: int = 16,
    streamer: Any = None,
    images: ImageProcessor | None = None,
) -> list[str]:
    """The model's continuation of each prompt, without the prompt and special tokens.

    Args:
        source: an engine, also one in training: its state is not changed.
        prompts: texts to continue, and messages to reply to.
        sampling: None: the model's own settings.
        streamer: transformers' streamer, which gets each new token; for a single prompt.
        images: the model's processor, for messages with images; each prompt is a batch then.

    Raises InputError: a prompt cannot be used, or fills the model's context; DoesNotFit: there is
    no memory for the keys and values of a batch.
    """
    sampling = sampling or Sampling()
    config = source.config.get_text_config(decoder=True)
    encoded = [
        prompt_ids(tokenizer, prompt, config.vocab_size, f"prompt {number}", images)
        for number, prompt in enumerate(prompts, 1)
    ]
    media = {
        row: images.inputs([ids], [pictures])
        for row, (ids, pictures) in enumerate(encoded)
        if pictures and images
    }
    chat = any(not isinstance(prompt, str) for prompt in prompts)
    stops = stop_ids(source, tokenizer, chat=chat)
    rows = continued(
        source,
        [ids for ids, _ in encoded],
        sampling,
        source.generation_config,
        stops=stops,
        pad=pad_id(tokenizer, config.vocab_size),
        batch_size=1 if media else batch_size,
        tokenizer=tokenizer,
        streamer=streamer,
        media=media,
    )
    with tokenising("the new tokens"):
        return tokenizer.batch_decode(
            [row[:-1] if row[-1:] and row[-1] in stops else row for row in rows],
            skip_special_tokens=True,
        )


def continued(
    source: Engine,
    ids: Ids,
    sampling: Sampling,
    of_model: GenerationConfig,
    *,
    stops: set[int],
    pad: int,
    batch_size: int,
    apart: bool = False,
    first: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
    media: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
) -> list[list[int]]:
    """The new tokens of each prompt (`ids`), up to and with the first of `stops`.

    Args:
        of_model, stops, pad: as of `Sampling.settings`; others as of `generate`.
        apart: a prompt's tokens depend on the seed and the prompt's number alone, and several ranks
            share a batch. `of_model` has no sampling settings then.
        first: the number of the first prompt.
        tokenizer: for `of_model.stop_strings`.
        media: the tensors of prompts with images, by number; then `batch_size` is 1.
    """
    limit = _longest_row(source, ids, sampling.max_new_tokens)
    ranks = source.ranks if apart else ALONE
    new_tokens: dict[int, list[int]] = {}  # by row
    longest = max(map(len, ids), default=0) + sampling.max_new_tokens
    at_once, device = -(-min(batch_size, len(ids)) // ranks.size), source.device.torch_device
    with ExitStack() as stack:
        model = stack.enter_context(_running(source, at_once, longest, apart=apart))
        # The loss of routers would fail with a cache: it gets one token, and the mask of all.
        configs = model.config, model.config.get_text_config(decoder=True)
        stack.enter_context(changed(configs, output_router_logits=False))
        if not apart:
            torch.manual_seed(sampling.seed)
        for batch in _batches(source, model, ids, batch_size):
            count = -(-len(batch) // ranks.size)  # rows of a rank
            of_rank = batch[ranks.rank * count :][:count]
            rows = of_rank + batch[:1] * (count - len(of_rank))  # as many as on other ranks
            width = max(len(ids[row]) for row in batch)
            num_new = min(sampling.max_new_tokens, limit - width)
            source.ranks.agree(partial(check_cache, source.device, model, count, width + num_new))
            settings = sampling.settings(
                of_model, room=num_new, stops=stops, pad=pad, cached=_layers_of(model) is not None
            )
            extras: dict[str, Any] = {"logits_processor": [OnlyNumbers()]}
            if apart and settings.do_sample:  # instead of transformers' sampling
                draws = OwnDraws(settings, sampling.seed, [first + row for row in rows], device)
                extras["logits_processor"].append(draws)
                settings.do_sample = False
                settings.temperature = settings.top_p = settings.top_k = None
            if ranks.size > 1:
                unused = torch.arange(len(rows), device=device) >= len(of_rank)
                extras["stopping_criteria"] = [AllEnded(ranks, stops, unused)]
                settings.eos_token_id = None
            for name, value in media.get(batch[0], {}).items():
                extras[name] = as_computed(value, model.dtype).to(device)
            output = model.generate(
                **_padded([ids[row] for row in rows], width, pad, device),
                **extras,
                generation_config=settings,
                tokenizer=tokenizer,
                streamer=streamer,
            )
            generated = output.sequences[: len(of_rank), width:].tolist()
            for row, tokens in zip(of_rank, generated, strict=True):
                ends = (size for size, token in enumerate(tokens, 1) if token in stops)
                new_tokens[row] = tokens[: next(ends, len(tokens))]
    merged = dict(pair for part in ranks.all_gather_object(new_tokens) for pair in part.items())
    return [merged[row] for row in range(len(ids))]


def _padded(ids: Ids, width: int, pad: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs of `generate`: prompts padded on the left to `width` tokens, and their mask."""
    rows = [[pad] * (width - len(row)) + list(row) for row in ids]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
    tensors = {"inputs": rows, "attention_mask": mask}
    return {name: torch.tensor(values, device=device) for name, values in tensors.items()}


def _batches(source: Engine, model: PreTrainedModel, ids: Ids, batch_size: int) -> list[list[int]]:
    """Batches of rows in their order; of rows of one length if padding would change results."""
    parts = [[*range(len(ids))]]
    needs_padding = batch_size > 1 and len({len(row) for row in ids}) > 1
    if needs_padding and not all(source.ranks.all_gather_object(heeds_mask(model))):
        log.info("padding would change this model's texts: a batch has prompts of one length")
        of_length = defaultdict(list)
        for row, tokens in enumerate(ids):
            of_length[len(tokens)].append(row)
        parts = list(of_length.values())
    return [p[start : start + batch_size] for p in parts for start in range(0, len(p), batch_size)]


@contextmanager
def _running(source: Engine, rows: int, tokens: int, *, apart: bool) -> Iterator[PreTrainedModel]:
    """Within this context the model for rows of this length; on the device if the weights fit.

    Its generation_config is empty, as transformers would complete settings from it.
    """
    empty = {"generation_config": GenerationConfig()}
    try:
        with source.whole_model() as model, changed([model], **empty):
            needed = cache_bytes(model, rows, tokens)
        with source.whole_model(spare=needed, apart=apart) as model, changed([model], **empty):
            yield model
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            "the device has no memory left; take fewer prompts at once, or shorter ones"
        ) from error


def stop_ids(source: Engine, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> set[int]:
    """The tokens that end a text: the model's, the tokenizer's, and in a chat the template's."""
    eos = source.generation_config.eos_token_id
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
    if chat:
        ends.add(end_of_turn(tokenizer))
    return {end for end in ends if end is not None}


def _longest_row(source: Engine, ids: Ids, new_tokens: int) -> int:
    """The longest possible row. Raises InputError: a prompt fills the model's context."""
    limit = most_tokens(source.config)
    if limit is None or not ids:
        return sys.maxsize
    number, longest = max(enumerate(map(len, ids), 1), key=lambda pair: pair[1])
    problem = f"prompt {number}: {longest} tokens leave"
    if longest >= limit:
        raise InputError(f"{problem} no room in a context of {limit}; shorten it")
    if longest + new_tokens > limit:
        message = "%s room for %d new ones in a context of %d, not %d"
        log.warning(message, problem, limit - longest, limit, new_tokens)
    return limit


def cache_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """The bytes of the model's cache for `rows` rows of `tokens` tokens.

    Two short prompts measure it once for a model: a layer keeps the same bytes for each token, up
    to its window. The largest layer counts twice, as a cache grows into a new tensor.
    """
    sizes = []
    for first, second, window in _layers_of(model) or []:
        cached_tokens = min(tokens, window or tokens)
        sizes.append(rows * (first + (second - first) * (cached_tokens - _TRIAL_LENGTHS[0])))
    return sum(sizes) + max(sizes, default=0)


def check_cache(device: Device, model: PreTrainedModel, rows: int, tokens: int) -> None:
    """Raises DoesNotFit: the device has no memory for the cache."""
    needed, free = cache_bytes(model, rows, tokens), free_bytes(device)
    if needed > free:
        raise DoesNotFit(
            f"the keys and values of {rows} prompts of {tokens} tokens take {gib(needed)}, and "
            f"{gib(free)} are free; take fewer prompts at once, shorter ones, or fewer new tokens"
        )


def _layers_of(model: PreTrainedModel) -> _Layers | None:
    """The sizes of each layer's cache, tried once for a model; None: the model needs to do without.

    Some families' masks ask a cache for its number of tokens, which a cache of states alone lacks.
    """
    if model not in _caches:
        try:
            outputs = (_next_token(model, [0] * n, 0, use_cache=True) for n in _TRIAL_LENGTHS)
            short, longer = (_layers(*cache_of(output).values()) for output in outputs)
            layers = zip(short, longer, strict=True)
            _caches[model] = [(first, second, window) for (first, window), (second, _) in layers]
        except (torch.OutOfMemoryError, MegatrainError):
            raise
        except Exception as error:  # the model's code raises any, such as a mask for a length
            log.info(
                "no cache of %s can be used, so that each new token takes the whole text again: %s",
                model.config.model_type,
                in_one_line(error, 200),
            )
            _caches[model] = None
    return _caches[model]


def _next_token(model: PreTrainedModel, ids: Sequence[int], padding: int, **options: bool) -> Any:
    """The output of `generate` for one token after `padding` tokens of padding and `ids`."""
    return model.generate(
        **_padded([ids], len(ids) + padding, _PROMPT[0], model.device),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def _layers(cache: Any) -> list[tuple[int, int | None]]:
    """The bytes and the sliding window, or None, of each layer of a cache."""
    sizes = []
    for layer in getattr(cache, "layers", [cache]):
        leaves = pytree.tree_leaves(dict(getattr(layer, "__dict__", layer)))
        num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        sizes.append((num_bytes, getattr(layer, "sliding_window", None)))
    return sizes


def heeds_mask(model: PreTrainedModel) -> bool:
    """True if padding does not change logits, as it does states; tried once for a model."""
    if model not in _heeding:
        plain, padded = _logits(model, 0), _logits(model, _PADDING)
        spread = float((plain - plain.mean()).abs().max())
        share = _ROUNDED.get(model.dtype, 0.1)
        _heeding[model] = float((plain - padded).abs().max()) <= share * spread
    return _heeding[model]


def _logits(model: PreTrainedModel, padding: int) -> Tensor:
    use_cache = _layers_of(model) is not None
    output = _next_token(model, _PROMPT, padding, use_cache=use_cache, output_logits=True)
    return output.logits[0].float()
