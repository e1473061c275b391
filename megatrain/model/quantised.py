"""Reads weights that a folder stores quantised (packed): as values, or as the bytes of a format.

Values are those of transformers' own dequantisation, bit for bit: mxfp4 (gpt-oss), float8 in blocks
(DeepSeek-V3, Kimi K2, Qwen3, MiniMax), float8, int8 and int4 of compressed-tensors, and integers of
GPTQ and AWQ, in the dtype of their scales. NF4 of bitsandbytes and float8 of torchao are read as
bytes of the formats in which tiles keep them, and no value changes. Sources, on GitHub:
huggingface/transformers (integrations: mxfp4.py, finegrained_fp8.py), vllm-project/
compressed-tensors, AutoGPTQ/AutoGPTQ (qlinear_cuda_old.py), casper-hansen/AutoAWQ
(utils/packing_utils.py), bitsandbytes-foundation/bitsandbytes (QuantState.as_dict), pytorch/ao.

Legend: E experts, O outputs, I inputs, G groups of inputs that share a scale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn

from megatrain.base.json_yaml import DAMAGED, parse_object, read_json
from megatrain.errors import InputError, explained
from megatrain.model.safetensors_io import Stored
from megatrain.tile.formats import BLOCKS, FP8, MXFP4, NF4, NF4_WIDE, SIDE, WeightFormat, is_nf4

Settings = Mapping[str, Any]
Block = Sequence[int | None]  # numbers of rows and of columns that share a scale; None: all

_CODES = {
    "pack-quantized": torch.int32,
    "int-quantized": torch.int8,
    "float-quantized": torch.float8_e4m3fn,
}
_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_QDATA = "._weight_qdata"
# Endings of tensors that only a quantised forward needs, or that are not needed to unpack.
_UNUSED = (
    *(f".{what}_{part}" for what in ("input", "output") for part in ("scale", "zero_point")),
    *(".activation_scale", ".qscale_act", ".weight_shape", ".q_scale", ".k_scale", ".v_scale"),
    *(_STATE, ".quant_map", ".nested_quant_map"),
)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_REMEDY = "take the unquantised model, with `base: nf4` or `base: fp8` it is packed as it is read"


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json, or of its text_config (Kimi K2.5); or empty."""
    nested, key = config.get("text_config"), "quantization_config"
    settings = config.get(key) or (nested if isinstance(nested, dict) else {}).get(key) or {}
    settings = settings if isinstance(settings, dict) else {"quant_method": settings}
    names: Settings = _OTHER_NAMES.get(str(settings.get("quant_method")), {})
    return {names.get(name, name): value for name, value in settings.items()} | settings


def unpacked_format(config: Mapping[str, Any]) -> str | None:
    """The format from which a folder's weights are unpacked while they are read; None: as stored.

    Args: `config`: the content of its config.json.
    """
    settings = quantisation(config)
    method = str(settings.get("quant_method"))
    if method not in _MAKERS.keys() - _KEPT or any(_unsupported(settings)):
        return None
    formats = ", ".join(sorted({scheme["format"] for scheme in _schemes(settings)}))
    return f"{method} ({formats})" if formats else method


def kept_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """The format in which tiles can keep weights that are unpacked by default; None: none can."""
    settings = quantisation(config)
    block = settings.get("weight_block_size", [SIDE, SIDE])
    formats = {"mxfp4": MXFP4, "fp8": BLOCKS if block == [SIDE, SIDE] else None}
    return formats.get(str(settings.get("quant_method")))


def quantised_base(config: Mapping[str, Any], where: Path | str) -> Literal["fp8", "nf4"] | None:
    """The format of weights that stay quantised; None: there are none. Raises InputError."""
    settings = quantisation(config)
    method = settings.get("quant_method", f"an unnamed method, {settings}")  # for the message
    if not settings or unpacked_format(config):
        return None
    if method == "bitsandbytes":
        if settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4":
            return "nf4"
        method = f"bitsandbytes in {'FP4' if settings.get('load_in_4bit') else '8 bits'}"
    elif method == "torchao":
        kind = settings.get("quant_type")
        kind = kind.get("default") if isinstance(kind, dict) else kind
        kind = kind.get("_type") if isinstance(kind, dict) else kind
        if kind == "Float8WeightOnlyConfig":
            return "fp8"
        method = f"torchao ({str(kind)[:80]})"
    elif unsupported := next(_unsupported(settings), None):
        key, value = unsupported
        method = f"{method} with {key} {str(value)[:80]} (quantization_config)"
    raise InputError(
        f"{where}: its weights are quantised by {str(method)[:120]}; only NF4 of bitsandbytes and "
        "float8 of torchao (Float8WeightOnlyConfig) are taken as they are, and mxfp4, fp8, GPTQ, "
        f"AWQ and compressed-tensors (float8, int8, int4) unpacked; {_REMEDY}"
    )


def stays_whole(config: Mapping[str, Any], module: str) -> bool:
    """True if a quantised model's configuration leaves this module as it is."""
    from megatrain.compat.transformers import quantises

    settings = quantisation(config)
    keys = settings.get("llm_int8_skip_modules") or settings.get("modules_to_not_convert") or ()
    with explained(f"quantization_config skips {str(keys)[:80]}", "give names or patterns"):
        return not quantises(module, keys)


@dataclass(frozen=True, kw_only=True)
class Packed(Stored):
    """A weight of several stored parts; its dtype and shape are those of its values."""

    parts: tuple[Stored, ...]  # the scales first, then the codes
    unpack: Callable[..., Any]  # parts' tensors to the values, or with `packing` to its tensors
    packing: WeightFormat | None = None  # in which a tile can keep the weight; None: as values
    # from values to the parts' tensors; None: the folder's format cannot be written
    pack: Callable[[Tensor], Sequence[Tensor]] | None = None

    def read(self) -> Tensor:
        """The values, unpacked. Raises InputError: a scale is not finite, or not there."""
        if self.packing is None:
            with explained(f"{self.file}: groups of {self.name!r}", DAMAGED, of=IndexError):
                values: Tensor = self.unpack(*self._tensors())
            return values
        out = torch.empty(self.shape, dtype=self.packing.computed)
        self.packing.unpack(joined_bytes(self.packing_tensors()), out)
        return out.to(self.dtype)

    def packed(self, values: Tensor) -> dict[str, Tensor]:
        """The parts for these values, by name; the folder's own if all values are equal."""
        if torch.equal(values, self.read().to(values.dtype)):
            return {part.name: part.read() for part in self.parts}
        assert self.pack is not None
        packed = zip(self.parts, self.pack(values), strict=True)
        return {part.name: tensor.reshape(part.shape) for part, tensor in packed}

    def packing_tensors(self) -> Sequence[Tensor]:
        """The tensors whose bytes are those of `packing`. Raises InputError: as `read`."""
        tensors: Sequence[Tensor] = self.unpack(*self._tensors())
        return tensors

    def nf4_rows(self) -> tuple[Tensor, Tensor]:
        """The scales, in fp32, and the codes of each row of a matrix in NF4, for a join."""
        assert self.packing is not None
        data = joined_bytes(self.packing_tensors())
        codes, scales = self.packing.codes_and_scales(data, self.shape)
        return scales.view(self.shape[0], -1), codes.view(self.shape[0], -1)

    def _tensors(self) -> list[Tensor]:
        """The tensors of the parts. Raises InputError: a scale is not a finite number."""
        tensors = [part.read() for part in self.parts]
        scales = tensors[0]  # in uint8: exponents of two, of which 255 stands for NaN
        is_usable = scales != 255 if scales.dtype == torch.uint8 else scales.float().isfinite()
        if not is_usable.all():
            raise _refused(self.parts[0], "holds a scale that is NaN or infinite")
        return tensors

    def kept_open(self, opened: Callable[[Path], BinaryIO]) -> "Packed":
        return replace(self, parts=tuple(part.kept_open(opened) for part in self.parts))


def joined_bytes(tensors: Iterable[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def _unsupported(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Each setting, with its value, with which weights cannot be unpacked."""
    method = str(settings.get("quant_method"))
    if settings.get("weight_block_size") and not _is_block(settings["weight_block_size"]):
        yield "weight_block_size", settings["weight_block_size"]
    for key, supported in _SUPPORTED.get(method, {}).items():
        if settings.get(key, supported[0]) not in supported:
            yield key, settings[key]
    if (size := settings.get("group_size", -1)) != -1 and not _is_block((1, size or 0)):
        yield "group_size", size
    schemes = _schemes(settings)
    if method == "compressed-tensors" and not schemes:
        yield "config_groups", settings.get("config_groups")
    sizes: dict[str, Any] = {}  # group_size of the first scheme of each format
    for scheme in schemes:
        form, size = scheme["format"], scheme.get("group_size")
        checks = {"format": form in _CODES, "strategy": _is_block(_block(scheme))}
        if form == "pack-quantized":
            checks["num_bits"] = scheme.get("num_bits") == 4
            checks["type"] = scheme.get("type", "int") == "int"
            checks["actorder"] = scheme.get("actorder") in (None, False, "weight", "static")
        # Shapes alone do not tell which of several group sizes a weight has.
        if form == "pack-quantized" or size not in (None, -1):
            checks["group_size"] = size == sizes.setdefault(form, size)
        yield from ((key, scheme.get(key)) for key, has_passed in checks.items() if not has_passed)


def _is_block(block: Any) -> bool:
    sizes = block if isinstance(block, list | tuple) else ()
    return len(sizes) == 2 and all(n is None or (type(n) is int and n > 0) for n in sizes)


def _block(scheme: Settings) -> Any:
    """The rows and columns that share a scale in a compressed scheme; None: it is unknown."""
    size, block = scheme.get("group_size"), scheme.get("block_structure")
    usual = "tensor" if size is None else "group"
    usual = "block" if block else usual
    usual = "channel" if size == -1 else usual
    strategy = str(scheme.get("strategy") or usual)
    blocks = {"tensor": (None, None), "channel": (1, None), "group": (1, size or 0)}
    return block if strategy == "block" else blocks.get(strategy)


def with_packed_weights(folder: Path, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a folder, with one `Packed` in place of each quantised weight's parts.

    Raises InputError: parts are missing or damaged, or tensors do not match config.json.
    """
    config = read_json(folder / "config.json")
    settings = quantisation(config)
    if quantised_base(config, folder) is None and not unpacked_format(config):
        return dict(stored)
    method = str(settings["quant_method"])
    stored = {_usual_name(name, stored): tensor for name, tensor in stored.items()}
    ending, make = _MAKERS[method]
    packed = (make(n.removesuffix(ending), stored, settings) for n in stored if n.endswith(ending))
    weights = {weight.name: weight for weight in packed}
    if method in _KEPT and stored and not weights:
        raise _refused(min(stored.values(), key=str), f"is, as all others, not of {method}")
    parts = {part.name for weight in weights.values() for part in weight.parts}
    others = {n: t for n, t in stored.items() if t.name not in parts and not n.endswith(_UNUSED)}
    for name, tensor in sorted(others.items()):
        if name in weights:
            raise _refused(tensor, f"is stored beside its packed {weights[name].parts[1].name!r}")
        if name.endswith(".weight_packed") or tensor.dtype == torch.float8_e4m3fn:
            scale = "_scale_inv" if method == "fp8" else "_scale"
            raise _refused(tensor, f"lacks its {name.removesuffix('_packed') + scale!r}")
    return others | weights


def _usual_name(name: str, stored: Mapping[str, Stored]) -> str:
    """The usual name of a tensor: DeepSeek V4 and others rename the scales of float8 weights."""
    module, _, last = name.rpartition(".")
    weight = stored.get(f"{module}.weight")
    is_scale = weight and weight.dtype.itemsize == 1 and last in ("scale", "qscale_weight")
    return f"{module}.weight_scale_inv" if is_scale else name


def _mxfp4(name: str, stored: Mapping[str, Stored], settings: Settings) -> Packed:
    """A weight `[E, I, O]`: two 4-bit values in a byte `[E, O, G, 16]`, exponents `[E, O, G]`."""
    blocks = stored[f"{name}_blocks"]
    scales = stored.get(f"{name}_scales", blocks)
    fits = len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16)
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        problem = f"{blocks.dtype} {[*blocks.shape]} lacks its '{name}_scales'"
        raise _refused(blocks, f"of {problem} of uint8, one for 32 values")
    experts, outputs, groups = scales.shape
    shape = experts, 32 * groups, outputs
    return _weight(
        name, torch.bfloat16, shape, _turned, scales, blocks, packing=MXFP4, pack=_to_mxfp4
    )


def _turned(scales: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents and bytes, transposed to `MXFP4`'s order of inputs."""
    return scales.transpose(1, 2), blocks.flatten(2).transpose(1, 2)


def _to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents `[E, O, G]`, and two codes in a byte `[E, O, G, 16]`, of values `[E, I, O]`."""
    experts, inputs, outputs = values.shape
    exponents, codes = MXFP4.pack(values).split([values.numel() // 32, values.numel() // 2])
    exponents = exponents.view(experts, inputs // 32, outputs).transpose(1, 2)
    codes = codes.view(experts, inputs // 32, 16, outputs).permute(0, 3, 1, 2)
    return exponents, codes


def _fp8(name: str, stored: Mapping[str, Stored], settings: Settings) -> Packed:
    """A weight `[..., O, I]` of float8 values, with a scale for each block of rows and columns.

    DeepSeek V4's experts are int8: each has two 4-bit values, and 32 inputs share a scale.
    """
    scales, codes = stored[f"{name}_scale_inv"], stored.get(name)
    is_matrix = codes is not None and len(codes.shape) >= 2
    if codes is None or not is_matrix or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise _refused(scales, f"has no matrix {name!r} of float8 (e4m3) to scale")
    in_4_bits = codes.dtype == torch.int8
    size = [1, 32] if in_4_bits else settings.get("weight_block_size", [128, 128])
    block = size or (None, None)
    shape = (*codes.shape[:-1], codes.shape[-1] << in_4_bits)
    if not _fits(shape, scales, block):
        raise _unlike(codes, scales, f"weight_block_size {size}")
    packing = BLOCKS if [*block] == [SIDE, SIDE] and BLOCKS.takes(shape) else None
    unpack: Any = _with_fp32 if packing else partial(_scaled, block, torch.bfloat16)
    unpack = partial(_of_4_bits, unpack) if in_4_bits else unpack
    pack = None if in_4_bits else partial(_to_float8, block, scales.dtype)
    return _weight(name, torch.bfloat16, shape, unpack, scales, codes, packing=packing, pack=pack)


def _of_4_bits(unpack: Callable[..., Tensor], scales: Tensor, codes: Tensor) -> Tensor:
    return unpack(scales, MXFP4.values(codes.device)[_fields(codes, 4).int()])


def _with_fp32(scales: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    return _wide(scales), codes.view(torch.uint8)


def _wide(scales: Tensor) -> Tensor:
    """Scales, or exponents of two, in fp32."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _compressed(module: str, stored: Mapping[str, Stored], settings: Settings) -> Packed:
    """A weight `[O, I]` of float8 or integers, with scales for groups, rows or blocks."""
    name = f"{module}.weight"
    scales, zeros = stored[f"{name}_scale"], stored.get(f"{name}_zero_point")
    packed = stored.get(f"{name}_packed")
    codes = packed or stored.get(name)
    schemes = [s for s in _schemes(settings) if codes and _CODES[s["format"]] == codes.dtype]
    if codes is None or not schemes or len(codes.shape) != 2:
        raise _refused(scales, f"has no matrix {name!r} of the dtype of its format to scale")
    fitting = [scheme for scheme in schemes if _shape(codes, scales, _block(scheme))]
    if not fitting:
        keys = ("strategy", "group_size", "block_structure")
        scheme_text = ", ".join(f"{key} {schemes[0][key]}" for key in keys if schemes[0].get(key))
        raise _unlike(codes, scales, scheme_text)
    is_symmetric = zeros is None
    symmetric = [scheme.get("symmetric", True) for scheme in fitting]
    if is_symmetric not in symmetric:
        kind = "no zero points" if is_symmetric else "zero points"
        raise _refused(codes, f"has {kind}, but symmetric is {symmetric[0]}")
    block = _block(fitting[symmetric.index(is_symmetric)])
    shape = _shape(codes, scales, block)
    zeros_shape = (ceil(scales.shape[0] / 8), *scales.shape[1:]) if packed else scales.shape
    if zeros and zeros.shape != zeros_shape:
        raise _unlike(zeros, scales, "its zero points")
    unpack: Callable[..., Tensor] = partial(_scaled, block, scales.dtype)
    parts = [scales, codes, zeros]
    if packed:
        shape_tensor = stored.get(f"{name}_shape")
        parts.append(shape_tensor)
        unpack = partial(_of_int4, unpack, shape, shape_tensor)
    pack = partial(_to_float8, block, scales.dtype) if codes.dtype.is_floating_point else None
    return _weight(name, scales.dtype, shape, unpack, *filter(None, parts), pack=pack)


def _shape(codes: Stored, scales: Stored, block: Block) -> tuple[int, ...]:
    """The shape of the values of codes; () if there is not one scale for each block of values."""
    rows, columns = codes.shape
    if codes.dtype == torch.int32:  # 8 values each, but maybe fewer at a row's end
        num_scales, group_size = prod(scales.shape[-1:]), block[1] or 8 * columns  # of a row
        columns = min(8 * columns, num_scales * group_size)
        if ceil(columns / 8) != codes.shape[1]:
            return ()
    return (rows, columns) if _fits((rows, columns), scales, block) else ()


def _schemes(settings: Settings) -> list[dict[str, Any]]:
    """The schemes of a compressed model's groups of weights, each with its format."""
    groups = settings.get("config_groups")
    groups = [*groups.values()] if isinstance(groups, dict) else []
    if not all(isinstance(g, dict) and isinstance(g.get("weights"), dict) for g in groups):
        return []
    default = settings.get("format")
    schemes = [{**g["weights"], "format": str(g.get("format") or default)} for g in groups]
    for scheme in schemes:
        if scheme["format"] == "naive-quantized":
            scheme["format"] = f"{scheme.get('type', 'int')}-quantized"
    return schemes


def _of_int4(
    unpack: Callable[..., Tensor],
    shape: tuple[int, ...],
    shape_tensor: Stored | None,
    scales: Tensor,
    packed: Tensor,
    *further: Tensor,
) -> Tensor:
    """The values of `packed`; `further`: zero points, and the shape if there is `shape_tensor`."""
    zeros = further[:-1] if shape_tensor else further
    if shape_tensor and further[-1].tolist() != [*shape]:
        raise _refused(shape_tensor, f"is not {[*shape]}, the shape of the packed values")
    # An int32 of `packed` holds eight values of a row, one of `zeros` eight of a column.
    values = _fields(packed.view(torch.int8), 4)[:, : shape[1]] - 8
    columns = (_fields(zero.T.contiguous().view(torch.int8), 4).T - 8 for zero in zeros)
    return unpack(scales, values, *(column[: len(packed)] for column in columns))


def _integers(module: str, stored: Mapping[str, Stored], settings: Settings) -> Packed:
    """A weight `[O, I]` of GPTQ or AWQ: integers in int32, scales `[G, O]` and zero points.

    GPTQ packs inputs, and may have each one's group (g_idx); AWQ packs outputs, in another order.
    """
    is_awq = settings["quant_method"] == "awq"
    in_int32 = 32 // settings.get("bits", 4)  # integers in an int32
    codes = stored[f"{module}.qweight"]
    scales, zeros = stored.get(f"{module}.scales"), stored.get(f"{module}.qzeros")
    if scales is None or zeros is None:
        raise _refused(codes, f"lacks its '{module}.{'qzeros' if scales else 'scales'}'")
    if {codes.dtype, zeros.dtype} != {torch.int32} or len(codes.shape) != 2:
        raise _refused(codes, f"has {codes.dtype} and {zeros.dtype}, not matrices of int32")
    index = None if is_awq else stored.get(f"{module}.g_idx")
    inputs, outputs = codes.shape
    inputs, outputs = (inputs, outputs * in_int32) if is_awq else (inputs * in_int32, outputs)
    size = settings.get("group_size", 128)
    size = max(inputs, 1) if size == -1 else size
    groups = ceil(inputs / size)
    fits = scales.shape == (groups, outputs) and zeros.shape == (groups, outputs // in_int32)
    if not fits or (index and index.shape != (inputs,)):
        raise _unlike(codes, scales, f"group_size {size}, or others of zero points and g_idx")
    unpack = partial(_of_integers, settings, size)
    parts = filter(None, (scales, codes, zeros, index))
    return _weight(f"{module}.weight", scales.dtype, (outputs, inputs), unpack, *parts)


def _of_integers(
    settings: Settings, size: int, scales: Tensor, codes: Tensor, zeros: Tensor, *index: Tensor
) -> Tensor:
    """The values `[O, I]`: integers less the zero points of their groups, times the scales."""
    bits = settings.get("bits", 4)
    if settings["quant_method"] == "awq":
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of eight outputs in an int32
        integers, offsets = (
            _fields(packed, bits).unflatten(1, (-1, 8))[..., order].flatten(1)
            for packed in (codes, zeros)
        )
        integers = integers.T
    else:
        integers, offsets = _fields(codes.T, bits), _fields(zeros, bits)
        if settings.get("checkpoint_format") != "gptq_v2":  # the first version stores them less one
            offsets = (offsets + 1) & (2**bits - 1)
    groups = index[0].long() if index else torch.arange(integers.shape[1]) // size
    centred = (integers - offsets.index_select(0, groups).T).float()  # refuses negative groups
    return centred.mul_(scales.float().T[:, groups]).to(scales.dtype)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """The integers of `bits` bits in each integer of `[..., C]`, the lowest first."""
    shifts = torch.arange(0, 8 * packed.itemsize, bits, dtype=packed.dtype)
    return (packed[..., None] >> shifts & 2**bits - 1).flatten(-2)


def _nf4(name: str, stored: Mapping[str, Stored], of_folder: Settings) -> Packed:
    """A weight of bitsandbytes, whose settings are a tensor of JSON."""
    file = stored[name + _STATE].file
    settings = parse_object(stored[name + _STATE].read().numpy().tobytes(), file)
    pieces = {part: stored[name + part] for part in _PARTS if name + part in stored}
    nested = ".nested_absmax" in pieces  # the scales, less their mean, are quantised as well
    dtype = _DTYPES.get(str(settings.get("dtype")))
    offset = settings.get("nested_offset")
    sizes = settings.get("shape")
    shape: tuple[int, ...] = ()  # unless of two complete numbers
    if isinstance(sizes, list) and [type(size) for size in sizes] == [int, int]:
        shape = tuple(sizes)
    usual = {"quant_type": "nf4", "blocksize": 64}
    if nested:
        usual |= {"nested_blocksize": 256, "nested_dtype": "float32"}
    unusual = {key: settings.get(key) for key, value in usual.items() if settings.get(key) != value}
    if nested and not isinstance(offset, int | float):
        unusual["nested_offset"] = offset
    if unusual or dtype is None:
        unlike = unusual or {"dtype": settings.get("dtype")}
        raise InputError(f"{file}: {name!r} is quantised with {str(unlike)[:200]}; {_REMEDY}")
    packing = NF4 if nested else NF4_WIDE
    order = (".nested_absmax", "", ".absmax") if nested else (".absmax", "")
    is_complete = pieces.keys() == {*(_PARTS if nested else _PARTS[:3])}
    size = sum(pieces[part].num_bytes for part in order) + 4 * nested if is_complete else 0
    if not is_complete or not packing.takes(shape) or size != packing.bytes_of(shape):
        raise InputError(f"{file}: the parts of {name!r} do not make up its shape; {DAMAGED}")
    scale_codes = pieces[".nested_quant_map"].read() if nested else None
    if not is_nf4(pieces[".quant_map"].read(), scale_codes):
        raise InputError(f"{file}: {name!r} is quantised with other codes than NF4's; {_REMEDY}")
    mean = torch.tensor([offset] if nested else [], dtype=torch.float32)

    def unpack(*parts: Tensor) -> Sequence[Tensor]:
        return mean, *parts

    return _weight(name, dtype, shape, unpack, *(pieces[part] for part in order), packing=packing)


def _fp8_rows(module: str, stored: Mapping[str, Stored], settings: Settings) -> Packed:
    """A weight `[O, I]` of torchao: float8 values, with a scale for each row."""
    name = f"{module}.weight"
    codes = stored[module + _QDATA]
    scales = stored.get(f"{module}._weight_scale", codes)
    is_matrix = len(codes.shape) == 2 and prod(codes.shape) % 64 == 0
    fits = is_matrix and scales.shape == (codes.shape[0], 1)
    if (codes.dtype, scales.dtype) != (torch.float8_e4m3fn, torch.float32) or not fits:
        raise InputError(
            f"{codes.file}: {name!r} has no float8 (e4m3) values with an fp32 scale for each row; "
            f"{_REMEDY}"
        )
    return _weight(name, torch.bfloat16, codes.shape, _with_fp32, scales, codes, packing=FP8)


def _scales_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The shape of the scales of a weight `[..., O, I]` with one for each block."""
    *matrices, rows, columns = shape
    return (*matrices, ceil(rows / (block[0] or rows)), ceil(columns / (block[1] or columns)))


def _fits(shape: Sequence[int], scales: Stored, block: Block) -> bool:
    expected = _scales_shape(shape, block)
    return scales.shape == expected or (block[1] is None and prod(scales.shape) == prod(expected))


def _scaled(
    block: Block, dtype: torch.dtype, scales: Tensor, codes: Tensor, *zeros: Tensor
) -> Tensor:
    """The values, computed in fp32, of codes `[..., O, I]`; blocks share scales (and `zeros`)."""
    rows, columns = codes.shape[-2:]
    block_rows, block_columns = block[0] or rows, block[1] or columns  # 0: all
    grid = _scales_shape((rows, columns), block)

    def spread(of_blocks: Tensor) -> Tensor:
        of_rows = of_blocks.view(grid).repeat_interleave(block_rows, 0)[:rows]
        return of_rows.repeat_interleave(block_columns, 1)[:, :columns]

    out = torch.empty(codes.shape, dtype=dtype)
    matrices = (x.view(-1, rows, columns) for x in (out, codes))
    for target, values, scale in zip(*matrices, _wide(scales).view(-1, *grid), strict=True):
        values = values.float()
        for zero in zeros:
            values -= spread(zero.float())
        target.copy_(values.mul_(spread(scale)))
    return out


def _to_float8(block: Block, dtype: torch.dtype, values: Tensor) -> tuple[Tensor, Tensor]:
    """Scales with which the largest of each block becomes 448, and codes, of `[..., O, I]`."""
    rows, columns = values.shape[-2:]
    block_rows, block_columns = block[0] or rows, block[1] or columns
    padding = (0, -columns % block_columns, 0, -rows % block_rows)
    matrices = nn.functional.pad(values.float().reshape(-1, rows, columns), padding)
    blocks = matrices.unflatten(2, (-1, block_columns)).unflatten(1, (-1, block_rows))
    largest = blocks.abs().amax((2, 4), keepdim=True)
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(largest > 0, largest / limit, 1)
    if dtype.itemsize == 1:  # a power of two that is not smaller
        mantissa, exponent = torch.frexp(scales)
        scales = (exponent - (mantissa == 0.5).int() + 127).to(torch.uint8)
    else:
        scales = scales.to(dtype)
    codes = (blocks / _wide(scales)).clamp(-limit, limit).to(torch.float8_e4m3fn)
    whole = codes.reshape(matrices.shape)[:, :rows, :columns]
    return scales.view(dtype), whole.reshape(values.shape)


def _weight(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    unpack: Callable[..., Any],
    *parts: Stored,
    packing: WeightFormat | None = None,
    pack: Callable[[Tensor], Sequence[Tensor]] | None = None,
) -> Packed:
    """A weight of stored `parts`: scales, codes (messages name their file), then any others."""
    _, codes, *_ = parts
    num_bytes = prod(shape) * dtype.itemsize + sum(part.num_bytes for part in parts)  # to unpack it
    return Packed(
        name, codes.file, dtype, shape, start=0, num_bytes=num_bytes,
        parts=parts, unpack=unpack, packing=packing, pack=pack,
    )  # fmt: skip


def _unlike(codes: Stored, scales: Stored, setting: str) -> InputError:
    shapes = f"of {[*codes.shape]} has {scales.name!r} of {[*scales.shape]}"
    return _refused(codes, f"{shapes}, which are not the scales of {setting}")


def _refused(part: Stored, why: str) -> InputError:
    return InputError(
        f"{part.file}: {part.name!r} {why}; it does not belong to config.json's "
        "quantization_config, or the download is incomplete: download both again"
    )


# By method: the ending of one part of each weight, and the function that makes the weight.
_MAKERS: dict[str, tuple[str, Callable[..., Packed]]] = {
    "mxfp4": ("_blocks", _mxfp4), "fp8": ("_scale_inv", _fp8),
    "compressed-tensors": (".weight_scale", _compressed),
    "gptq": (".qweight", _integers), "awq": (".qweight", _integers),
    "bitsandbytes": (_STATE, _nf4), "torchao": (_QDATA, _fp8_rows),
}  # fmt: skip
_KEPT = {"bitsandbytes", "torchao"}  # all others are unpacked
_OTHER_NAMES = {  # of settings, in transformers and in AutoAWQ's own file
    "gptq": {"format": "checkpoint_format"},
    "awq": {"format": "version", "w_bit": "bits", "q_group_size": "group_size"},
}
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {  # settings, the default first
    "compressed-tensors": dict.fromkeys(("sparsity_config", "transform_config"), (None, {})),
    "gptq": {"bits": (4, 2, 8), "checkpoint_format": ("gptq", "gptq_v2"), "dynamic": (None, {})},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
}
