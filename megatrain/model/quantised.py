"""Weights that a folder stores quantised: NF4 of bitsandbytes, float8 of torchao.

Several tensors of a file are one weight; they become the bytes in which a tile keeps it, and no
value changes. https://github.com/bitsandbytes-foundation/bitsandbytes (QuantState.as_dict),
https://github.com/pytorch/ao (prototype/safetensors).
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.base.json_yaml import DAMAGED, parse_object, read_json
from megatrain.errors import InputError
from megatrain.model.safetensors_io import Stored
from megatrain.model.unpacked import Packed, unpacked, unpacked_from, untaken
from megatrain.tile.formats import BLOCKS, FP8, MXFP4, NF4, NF4_WIDE, SIDE, WeightFormat, is_nf4

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_QDATA, _SCALE = "._weight_qdata", "._weight_scale"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_REMEDY = "take the unquantised model, with `base: nf4` or `base: fp8` it is packed as it is read"


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json, empty if there is none."""
    settings = config.get("quantization_config") or {}
    return settings if isinstance(settings, dict) else {"quant_method": settings}


def unpacked_format(config: Mapping[str, Any]) -> str | None:
    """The format from which a folder's weights are unpacked while they are read; None: as stored.

    Args: `config`: the content of its config.json.
    """
    return unpacked_from(_settings(config))


def kept_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """The format in which tiles can keep weights that are else unpacked; None: there is none.

    Args: `config`: the content of the folder's config.json.
    """
    settings = _settings(config)
    block = settings.get("weight_block_size", [SIDE, SIDE])
    formats = {"mxfp4": MXFP4, "fp8": BLOCKS if block == [SIDE, SIDE] else None}
    return formats.get(str(settings.get("quant_method")))


def quantised_base(config: Mapping[str, Any], where: Path | str) -> Literal["fp8", "nf4"] | None:
    """How a model's folder quantises its weights; None: it does not, or they are unpacked.

    Args: `config`: the content of its config.json.

    Raises InputError: the way of quantising is not supported.
    """
    settings = _settings(config)
    method = settings.get("quant_method")
    if not settings or unpacked_from(settings):
        return None
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        if settings.get("bnb_4bit_quant_type") == "nf4":
            return "nf4"
        method = "bitsandbytes in FP4"
    elif method == "torchao":
        kind = settings.get("quant_type")
        kind = kind.get("default") if isinstance(kind, dict) else kind
        kind = kind.get("_type") if isinstance(kind, dict) else kind
        if kind == "Float8WeightOnlyConfig":
            return "fp8"
        method = f"torchao ({str(kind)[:80]})"
    elif method == "bitsandbytes":
        method = "bitsandbytes in 8 bits"
    elif setting := untaken(settings):
        method = f"{method} with {setting} (quantization_config)"
    raise InputError(
        f"{where}: its weights are quantised by {str(method)[:120]}; only NF4 of bitsandbytes and "
        "float8 of torchao (Float8WeightOnlyConfig) are taken as they are, and mxfp4, fp8, GPTQ, "
        f"AWQ and compressed-tensors (float8, int8, int4) unpacked; {_REMEDY}"
    )


def gathered(folder: Path, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a folder, each quantised weight as one in place of its parts.

    Raises:
        InputError: they are quantised otherwise than `quantised_base` says, or parts are damaged.
    """
    config = read_json(folder / "config.json")
    base = quantised_base(config, folder)
    if base is not None:
        quantised, parts = (_nf4_weights if base == "nf4" else _fp8_weights)(stored)
    elif unpacked_format(config):
        quantised, parts = unpacked(stored, _settings(config))
    else:
        return dict(stored)
    return {name: tensor for name, tensor in stored.items() if name not in parts} | quantised


def _nf4_weights(stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], set[str]]:
    weights, parts = dict[str, Stored](), set[str]()
    for name, state in stored.items():
        weight, mark, _ = name.partition(_STATE)
        if not mark:
            continue
        settings = parse_object(state.read().numpy().tobytes(), state.file)
        pieces = {part: stored[weight + part] for part in _PARTS if weight + part in stored}
        weights[weight] = _nf4(weight, state.file, settings, pieces)
        parts |= {name, *(weight + part for part in pieces)}
    return weights, parts


def _nf4(
    name: str, file: Path, settings: Mapping[str, Any], pieces: Mapping[str, Stored]
) -> Stored:
    nested, offset = ".nested_absmax" in pieces, settings.get("nested_offset")
    dtype, sizes = _DTYPES.get(str(settings.get("dtype"))), settings.get("shape")
    shape: tuple[int, ...] = ()  # unless of two complete numbers
    if isinstance(sizes, list) and [type(size) for size in sizes] == [int, int]:
        shape = tuple(sizes)
    usual = {"quant_type": "nf4", "blocksize": 64}
    usual |= {"nested_blocksize": 256, "nested_dtype": "float32"} if nested else {}
    others = {key: settings.get(key) for key, value in usual.items() if settings.get(key) != value}
    others |= {"nested_offset": offset} if nested and not isinstance(offset, int | float) else {}
    if others or dtype is None:
        unlike = others or {"dtype": settings.get("dtype")}
        raise InputError(f"{file}: {name!r} is quantised with {str(unlike)[:200]}; {_REMEDY}")
    packing = NF4 if nested else NF4_WIDE
    order = (".nested_absmax", "", ".absmax") if nested else (".absmax", "")
    complete = pieces.keys() == {*(_PARTS if nested else _PARTS[:3])}
    size = sum(pieces[part].num_bytes for part in order) + 4 * nested if complete else 0
    if not complete or not packing.takes(shape) or size != packing.bytes_of(shape):
        raise InputError(f"{file}: the parts of {name!r} do not make up its shape; {DAMAGED}")
    scale_codes = pieces[".nested_quant_map"].read() if nested else None
    if not is_nf4(pieces[".quant_map"].read(), scale_codes):
        raise InputError(f"{file}: {name!r} is quantised with other codes than NF4's; {_REMEDY}")
    mean = torch.tensor([offset] if nested else [], dtype=torch.float32)

    def unpack(*parts: Tensor) -> Sequence[Tensor]:
        return mean, *parts

    parts = tuple(pieces[part] for part in order)
    return Packed(name, file, dtype, shape, 0, size, parts=parts, unpack=unpack, packing=packing)


def _fp8_weights(stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], set[str]]:
    weights, parts = dict[str, Stored](), set[str]()
    for name, data in stored.items():
        if not name.endswith(_QDATA):
            continue
        weight = f"{name.removesuffix(_QDATA)}.weight"
        scale = stored.get(name.removesuffix(_QDATA) + _SCALE)
        rows = data.shape[:1]
        if (
            scale is None
            or len(data.shape) != 2
            or (data.dtype, scale.dtype) != (torch.float8_e4m3fn, torch.float32)
            or scale.shape != (*rows, 1)
            or prod(data.shape) % 64
        ):
            raise InputError(
                f"{data.file}: {weight!r} has no float8 (e4m3) values with an fp32 scale for each "
                f"row; {_REMEDY}"
            )
        size = data.num_bytes + scale.num_bytes
        place = weight, data.file, torch.bfloat16, data.shape, 0, size
        weights[weight] = Packed(*place, parts=(scale, data), unpack=_as_stored, packing=FP8)
        parts |= {name, scale.name}
    return weights, parts


def _as_stored(*parts: Tensor) -> Sequence[Tensor]:
    return parts
