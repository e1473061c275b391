"""Models to generate with, resident on the device where they fit, else streamed; their caches.

Short trials of a model show if it works with a cache of keys and values, the cache's size, and if
padding changes its logits.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from megatrain.api import Engine
from megatrain.autoplace.fits import limits
from megatrain.base.units import gib
from megatrain.checkpoint import Checkpoint
from megatrain.compat.torch import buffers_of, parameters_of
from megatrain.compat.transformers import scores_rows
from megatrain.device import Device, free_bytes, open_device
from megatrain.engine.whole_model import to_generate
from megatrain.errors import DoesNotFit, InputError, MegatrainError, first_line
from megatrain.model.adapters import plain
from megatrain.model.build import loaded_types
from megatrain.model.layer_template import move_buffers
from megatrain.model.weights import read_weights
from megatrain.parallel.distributed import ALONE
from megatrain.placement import Precision
from megatrain.source.base_reference import whole_masters
from megatrain.source.engine_setup import DTYPES
from megatrain.source.load_weights import read_adapter
from megatrain.source.source import Source, open_source
from megatrain.source.state_io import read_untrained
from megatrain.telemetry.host import update_threads

log = logging.getLogger(__name__)


class Resident:
    """A model on a device, ready to run.

    Attributes:
        ranks: as those of `Engine`.
    """

    ranks = ALONE

    def __init__(self, source: Source, device: Device, dtype: torch.dtype) -> None:
        """Read the weights of `source` to the device.

        Raises InputError: they are damaged, or not those of the model.
        """
        self.device = device
        self._model = source.model.eval()
        self.config: PreTrainedConfig = source.model.config
        types = loaded_types(source.model, dtype)
        values: dict[str, Tensor] = {}

        def write(name: str, tensor: Tensor) -> None:
            name = source.names.get(name, name)
            values[name] = tensor.to(device.torch_device, types[name])

        if source.saved is not None:
            for name, read in whole_masters(source.saved, source.model).items():
                write(name, read())
            read_untrained(source.saved, source.model)
        elif source.folder is not None:
            base = plain(source.model)
            missing = read_weights(source.folder, base, write, threads=update_threads())
            if missing:
                raise InputError(f"{source.folder}: has no {missing[0]}; it cannot generate")
        read_adapter(source, write)
        _fill(source.model, values)
        move_buffers(source.model, device.torch_device, types)

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings."""
        return self._model.generation_config

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, T, V]`, fp32 on the CPU."""
        with self.whole_model() as model:
            moved = {name: tensor.to(self.device.torch_device) for name, tensor in batch.items()}
            return model(**moved).logits.float().cpu()

    @contextmanager
    def whole_model(
        self, *, spare: int | None = None, apart: bool = False
    ) -> Iterator[PreTrainedModel]:
        """The model; the context restores the state of random generators."""
        gpus = [self.device.torch_device] if self.device.kind == "cuda" else []
        with torch.random.fork_rng(devices=gpus), to_generate():
            yield self._model

    def close(self) -> None:
        """Give the memory back."""
        for module in self._model.modules():
            parameters_of(module).clear()
        self.device.close()


TextModel = Engine | Resident


def _fill(model: PreTrainedModel, values: dict[str, Tensor]) -> None:
    """Put parameters and persistent buffers under all their names, tied ones too."""
    # If a weight requires no gradient, torch's matmul may copy it for each row.
    filled = {
        id(parameter): nn.Parameter(values[name], requires_grad=values[name].is_floating_point())
        for name, parameter in model.named_parameters()
    }
    buffers = {id(buffer): values[name] for name, buffer in model.named_buffers() if name in values}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                parameters_of(module)[name] = filled[id(parameter)]
        for name, buffer in buffers_of(module).items():
            if id(buffer) in buffers:
                buffers_of(module)[name] = buffers[id(buffer)]


# Share of free memory that weights may take; the rest is for activations and the cache.
_SHARE = 0.85


def open_model(
    model: Checkpoint | str,
    *,
    precision: Precision = "bf16",
    device: str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    base_model: str | None = None,
) -> Engine | Resident:
    """Open the model of a checkpoint, a folder or a hub id; the caller closes it.

    Args:
        device: None: the GPU if there is one.
        device_memory, host_memory, base_model: as `Engine` takes them.

    Raises:
        InputError: it cannot be read.
        DoesNotFit: host memory cannot hold it.
    """
    opened = open_device(device)
    device_limit, host_limit = limits(device_memory, host_memory)
    opened.limit(device_limit, host_limit)
    source = open_source(model, base_model=base_model)
    if scores_rows(source.model):
        raise InputError(f"{model}: its model gives scores of rows, and no texts")
    types = loaded_types(source.model, DTYPES[precision])
    needed = sum(p.numel() * types[n].itemsize for n, p in source.model.named_parameters())
    free = free_bytes(opened, host_limit)
    if needed <= _SHARE * free:
        return Resident(source, opened, DTYPES[precision])
    log.info(
        "the model takes %s and %s are free: its layers are streamed from host memory",
        gib(needed), gib(free),
    )  # fmt: skip
    return Engine(
        model,
        precision=precision,
        device=opened,
        device_memory=device_memory,
        host_memory=host_memory,
        base_model=base_model,
    )


_TRIED = (2, 3)  # tokens of the prompts whose caches are compared

# For each layer: bytes of a row at both lengths, and the most tokens that it keeps.
_Layers = list[tuple[int, int, int | None]]
_known: WeakKeyDictionary[PreTrainedModel, _Layers | None] = WeakKeyDictionary()


def takes_cache(model: PreTrainedModel) -> bool:
    """True if the model computes with a cache; tried once for a model.

    A cache of states alone does not count its tokens, and masks of some families ask for the count;
    others do not compute with one at all.
    """
    return _layers_of(model) is not None


def cache_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Bytes that the model's cache takes of `rows` rows of `tokens` tokens.

    Measured once for a model, by two short prompts: what a layer keeps of a token is the same of
    each, up to its window. The largest layer counts twice, since a cache grows into a new one.
    """
    sizes = []
    for first, second, window in _layers_of(model) or []:
        kept = min(tokens, window or tokens)
        sizes.append(rows * (first + (second - first) * (kept - _TRIED[0])))
    return sum(sizes) + max(sizes, default=0)


def check_cache(device: Device, model: PreTrainedModel, rows: int, tokens: int) -> None:
    """Raises DoesNotFit unless the device has room for the cache."""
    needed, free = cache_bytes(model, rows, tokens), free_bytes(device)
    if needed > free:
        raise DoesNotFit(
            f"the keys and values of {rows} prompts of {tokens} tokens take {gib(needed)}, and "
            f"{gib(free)} are free; take fewer prompts at once, shorter ones, or fewer new tokens"
        )


def _layers_of(model: PreTrainedModel) -> _Layers | None:
    """The cache of each layer; None: the model does not compute with a cache."""
    if model not in _known:
        try:
            outputs = (_next_token(model, [0] * n, 0, use_cache=True) for n in _TRIED)
            first, second = (_layers(output.past_key_values) for output in outputs)
            pairs = zip(first, second, strict=True)
            _known[model] = [(a, b, window) for (a, window), (b, _) in pairs]
        except (torch.OutOfMemoryError, MegatrainError):
            raise
        except Exception as error:  # of the model's code: a mask that asks states for their length
            log.info(
                "it generates with no cache of %s, every token is made of all before it anew: %s",
                model.config.model_type,
                first_line(error),
            )
            _known[model] = None
    return _known[model]


def _next_token(model: PreTrainedModel, ids: list[int], padding: int, **options: bool) -> Any:
    """The output of `generate` for one token after `ids`, the first `padding` of them masked."""
    row = torch.tensor([ids], device=model.device)
    mask = (torch.arange(len(ids), device=model.device) >= padding).long()[None]
    return model.generate(
        row,
        attention_mask=mask,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def _layers(cache: Any) -> list[tuple[int, int | None]]:
    """Bytes and sliding window (None: none) of each layer of a cache."""
    layers = getattr(cache, "layers", [cache])
    return [
        (_held(getattr(layer, "__dict__", layer)), getattr(layer, "sliding_window", None))
        for layer in layers
    ]


def _held(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_held, value.values()))
    return sum(map(_held, value)) if isinstance(value, list | tuple) else 0


_PROMPT = (5, 7, 6, 9)  # ids that every vocabulary has
_PADDED = 3
_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' spread: more is no rounding
_heeding: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def heeds_mask(model: PreTrainedModel) -> bool:
    """True if padding does not change a prompt's logits; tried once for a model.

    States and convolutions of some families include padding.
    """
    if model not in _heeding:
        plain, padded = _logits(model, 0), _logits(model, _PADDED)
        spread = float((plain - plain.mean()).abs().max())
        share = _SHARE.get(model.dtype, 0.1)
        _heeding[model] = float((plain - padded).abs().max()) <= share * spread
    return _heeding[model]


def _logits(model: PreTrainedModel, padding: int) -> Tensor:
    ids, cached = [_PROMPT[0]] * padding + list(_PROMPT), takes_cache(model)
    return _next_token(model, ids, padding, use_cache=cached, output_logits=True).logits[0].float()
