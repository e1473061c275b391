"""Reads and writes safetensors shards, one tensor at a time; headers are checked first.

The safetensors library maps whole files, and mapped pages count as memory of the process. Here
each tensor is read and written by itself: a load or an export holds only the tensors in flight.
Format: eight bytes of header length, a JSON header, the data without holes
(https://huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrain.base import huge_pages
from megatrain.base.json_yaml import DAMAGED, MAX_JSON_BYTES, parse_object, read_json
from megatrain.base.units import MIB, align
from megatrain.base.whole_files import fill
from megatrain.errors import InputError, explained, in_one_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_DIMENSIONS = 16
OWN_MAPPING_BYTES = 4 * MIB  # a smaller mapping (of two huge pages) costs more than it saves

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, and the place of its bytes there."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # the place of the first byte
    num_bytes: int
    opened: BinaryIO | None = None  # the open file, which can be read even if its name is deleted

    def read(self) -> Tensor:
        """The tensor's values in new memory, on the CPU, in the file's dtype."""
        return self.read_bytes(0, self.num_bytes).view(self.dtype).view(self.shape)

    def read_bytes(self, offset: int, num_bytes: int) -> Tensor:
        """A part of the tensor's bytes, uint8.

        Raises InputError: the file became unreadable or shorter since its header was checked.
        """
        # The C library would keep freed blocks of some 30 MB for each thread, in small pages: on
        # two cores a thread read 1.0 GB/s into small pages and 3.2 GB/s into huge ones.
        if num_bytes < OWN_MAPPING_BYTES:
            data = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            data = torch.frombuffer(huge_pages.mapping(num_bytes), dtype=torch.uint8)
        problem = f"{self.file}: cannot read {self.name!r}"
        with (
            explained(problem, DAMAGED, of=(OSError, EOFError)),
            nullcontext(self.opened) if self.opened else self.file.open("rb") as file,
        ):
            fill(data.numpy().data, file.fileno(), self.start + offset)
        return data

    def kept_open(self, opened: Callable[[Path], BinaryIO]) -> "Stored":
        """The same tensor, read from a file that stays open."""
        return replace(self, opened=opened(self.file))

    def blank(self) -> Tensor:
        """A meta tensor of the same shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the safetensors checkpoint in a folder, from the headers alone.

    Raises InputError: there are no safetensors, or index and headers contradict each other.
    """
    if (folder / SINGLE_FILE).is_file():
        return {stored.name: stored for stored in read_header(folder / SINGLE_FILE)}
    if not (folder / INDEX_FILE).is_file():
        hint = "; give a folder with safetensors weights"
        if has_pickle_weights(folder):
            hint = ", only pickle weights, which can run code and are never read; convert them "
            hint += "with transformers (from_pretrained, then save_pretrained) where you trust them"
        raise InputError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}{hint}")
    file_of = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise InputError(f"{folder / INDEX_FILE}: no weight_map; {DAMAGED}")
    paths = {name: _shard(folder, file_name) for name, file_name in file_of.items()}
    entries = [entry for path in dict.fromkeys(paths.values()) for entry in read_header(path)]
    stored = {entry.name: entry for entry in entries}
    wrong = [entry.name for entry in entries if stored[entry.name] is not entry]
    wrong += [n for n, path in paths.items() if n not in stored or stored[n].file != path]
    if wrong:
        raise InputError(
            f"{folder / INDEX_FILE}: {wrong[0]!r} is not in the one shard that the index names: "
            "download the model again"
        )
    return stored


def has_weights(folder: Path) -> bool:
    """True if a folder holds a model's safetensors weights."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def has_pickle_weights(folder: Path) -> bool:
    """True if a folder holds weights in torch's pickle format, which is never read."""
    return any(True for pattern in ("*.bin", "*.pt", "*.pth") for _ in folder.glob(pattern))


def _shard(folder: Path, file_name: Any) -> Path:
    """The path of a shard. Raises InputError: it is not inside the folder, or does not exist."""
    with suppress(OSError, TypeError, ValueError):  # no name, or one longer than any file has
        relative = PurePosixPath(file_name)
        is_inside = not relative.is_absolute() and ".." not in relative.parts
        if is_inside and (folder / file_name).is_file():
            return folder / file_name
    raise InputError(
        f"{folder / INDEX_FILE}: it names the shard {in_one_line(repr(file_name), 200)}, which is "
        "not in the folder; the download is incomplete, fetch the model again"
    )


def read_header(path: Path) -> list[Stored]:
    """The tensors of one shard in the order of their bytes.

    Raises InputError: the header is malformed, or does not match the bytes that follow.
    """
    kinds = OSError, SafetensorError
    with explained(f"{path}: damaged or truncated", "fetch the file again", of=kinds):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > MAX_JSON_BYTES:
                raise InputError(
                    f"{path}: its first 8 bytes ask for a header of {header_bytes} bytes; it is "
                    "truncated or not a safetensors file"
                )
            entries = parse_object(file.read(header_bytes), path)
        with safe_open(path, "np"):  # checks that the tensors fill the file without gaps
            entries.pop("__metadata__", None)
    tensors = [_entry(path, name, entry, 8 + header_bytes) for name, entry in entries.items()]
    return sorted(tensors, key=lambda stored: (stored.start, stored.num_bytes))


def _entry(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> Stored:
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise InputError(
            f"{path}: {name!r} is stored as {dtype}; only plain float weights can be trained, use "
            "the unquantised model"
        )
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 2**63:
        raise InputError(f"{path}: {name!r} has an impossible shape; {DAMAGED}")
    return Stored(name, path, DTYPES[dtype], tuple(shape), data_start + first, last - first)


def header_bytes(
    described: Mapping[str, Tensor], metadata: dict[str, str], boundary: int = 8
) -> bytes:
    """The header of a file with tensors like these (they may be meta), end to end in this order.

    The data start at a multiple of `boundary`. Tensors are aligned if element sizes never increase.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in described.items():
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align(8 + len(text), boundary) - 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, described: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write a shard; `tensors` yields each in turn, in the order of `described` (`header_bytes`).

    Raises OSError: the disk cannot be written; ValueError: a tensor differs from `described`.
    """
    with path.open("wb") as file:
        file.write(header_bytes(described, {"format": "pt"}))
        values = iter(tensors)
        for name, like in described.items():
            tensor = next(values)
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                raise ValueError(f"{name!r} is not as announced in the header")
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
