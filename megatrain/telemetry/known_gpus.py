"""GPUs and their published figures, from `gpus.json` (each entry names its source)."""

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from megatrain.base.units import GIB
from megatrain.errors import InputError

# Words in drivers' names that people leave out.
_MAKERS = {"nvidia", "geforce", "rtx", "amd", "instinct", "radeon"}
# Words for parts of a product or slower versions, which have the product's name.
_LESSER = {"laptop", "mobile", "max", "mig", "vgpu"}
# Suffixes of other products: a 3060 Ti has 8 GiB, a 3060 has 12.
_OTHER = {"ti", "super"}


@dataclass(frozen=True)
class KnownGpu:
    """An entry of `gpus.json`: nominal peaks and sizes, and the shares usually reached.

    Attributes:
        bus_gbps: one way between host and device, from the link's generation and lanes.
        host: `desktop`, `workstation` or `server`: the usual machine around it.
        shares: of the peaks, reached in `matmul`, `attention_forward`, `attention_backward` and
            `memory`.
    """

    name: str
    bf16_tflops: float
    fp32_tflops: float
    memory_gib: float
    memory_gbps: float
    bus_gbps: float
    host: str
    shares: dict[str, float]
    words: frozenset[str]
    source: str


def by_driver_name(gpu_name: str) -> KnownGpu | None:
    """The entry for a driver's product name; None when not listed, or only a part of a GPU."""
    words = _words(gpu_name)
    if words & _LESSER:
        return None
    fitting = [g for g in known_gpus() if g.words <= words and not (words - g.words) & _OTHER]
    return max(fitting, key=lambda gpu: len(gpu.words), default=None)


def named_gpu(text: str) -> KnownGpu:
    """The entry that a user means: `4090`, `rtx4090`, `H100 PCIe`, or a driver's product name.

    Raises:
        InputError: no entry fits, or its memory differs from the text's.
    """
    wanted = _squeezed(text)
    for gpu in known_gpus():
        if _squeezed(gpu.name) == wanted:
            return gpu
    if (known := by_driver_name(text)) is not None:
        _check_size(text, known)
        return known
    raise InputError(
        f"unknown GPU {text!r}{_nearest(text)} (for one that is not listed, name the most similar "
        "and give --device-memory)"
    )


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """All entries of `gpus.json`."""
    path = resources.files("megatrain.telemetry").joinpath("gpus.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    return tuple(_entry(entry, table["shares"]) for entry in table["gpus"])


def most_memory() -> int:
    """The largest memory of a GPU in `gpus.json`, in bytes."""
    return int(max(gpu.memory_gib for gpu in known_gpus()) * GIB)


def pcie_gbps(generation: int, lanes: int) -> float:
    """The nominal GB/s of a PCIe link in one direction: 2 GB/s a lane in generation 4."""
    return 2.0 * lanes * 2.0 ** (generation - 4)


def _check_size(text: str, gpu: KnownGpu) -> None:
    """Refuse a size that the GPU is not sold with; a far larger one is the host's (GH200 480GB)."""
    for size in map(int, re.findall(r"(\d+) ?g(?:i?b)?\b", text.lower())):
        if max(size / gpu.memory_gib, gpu.memory_gib / size) > 1.15 and size < 3 * gpu.memory_gib:
            raise InputError(
                f"GPU {text!r}: {gpu.name} is listed with {gpu.memory_gib:g} GiB; give --gpu "
                f"'{gpu.name}' and --device-memory {size}GiB"
            )


def _entry(entry: dict[str, Any], shares: dict[str, dict[str, float]]) -> KnownGpu:
    figures = {key: value for key, value in entry.items() if key in KnownGpu.__annotations__}
    return KnownGpu(
        **{"bus_gbps": pcie_gbps(*entry["pcie"])} | figures,
        shares=shares[entry["family"]],
        words=frozenset(_words(entry.get("key", entry["name"]))),
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - _MAKERS


def _squeezed(name: str) -> str:
    return re.sub(rf"{'|'.join(sorted(_MAKERS))}|[^a-z0-9]", "", name.lower())


def _nearest(text: str) -> str:
    wanted = _words(text)
    close = [gpu.name for gpu in known_gpus() if wanted and wanted <= gpu.words]
    names = {_squeezed(gpu.name): gpu.name for gpu in known_gpus()}
    near = difflib.get_close_matches(_squeezed(text), names, n=3, cutoff=0.5)
    if close or near:
        return f"; did you mean {' or '.join(close or [names[name] for name in near])}?"
    return f"; known are {', '.join(names.values())}"
