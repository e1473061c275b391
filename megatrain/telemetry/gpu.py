"""The GPUs of this machine, as the driver reports them, and the published figures of GPUs.

The figures are in `gpus.json`; each entry names its source.
"""

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from megatrain.base.units import GIB
from megatrain.driver.base import Driver, Gpu
from megatrain.errors import InputError

# Words in drivers' names that people leave out.
_MAKERS = {"nvidia", "geforce", "rtx", "amd", "instinct", "radeon", "apple"}
# Words for a part or a slower version of a product, beside the product's name.
_LESSER_MODELS = {"laptop", "mobile", "max", "mig", "vgpu"}
# Suffixes of other products: a 3060 Ti has 8 GiB, a 3060 has 12.
_OTHER_MODELS = {"ti", "super"}


def find_driver() -> Driver:
    """The driver of the GPUs that torch is built for."""
    import torch

    from megatrain.driver.amd import Amd
    from megatrain.driver.nvidia import Nvidia

    return Amd() if torch.version.hip else Nvidia()


def find_gpu(device: str = "auto") -> Gpu | None:
    """The GPU that torch calls `device`, or the first one for `auto`; None: there is none."""
    number = re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", device)
    return None if number is None else find_driver().gpu(int(number[1] or 0))


@dataclass(frozen=True)
class KnownGpu:
    """An entry of `gpus.json`: nominal peaks and sizes, and the shares of them usually reached."""

    name: str
    bf16_tflops: float
    fp32_tflops: float
    memory_gib: float
    memory_gbps: float
    bus_gbps: float  # one way between host and device
    host: str  # the usual machine: `desktop`, `workstation` or `server`
    shares: dict[str, float]  # reached by products, attention and memory
    words: frozenset[str]
    source: str
    # the part of the one memory of host and GPU that work may take; 0: two memories
    shared: float = 0.0
    link_gbps: float = 0.0  # between cards of a host; 0: they have no link
    measured: str = ""  # others' measurements of training on this GPU, with the source
    also: tuple[str, ...] = ()  # names of machines with this GPU


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """All entries of `gpus.json`."""
    path = resources.files("megatrain.telemetry").joinpath("gpus.json")
    table, gpus = json.loads(path.read_text(encoding="utf-8")), []
    for entry in table["gpus"]:
        figures = {key: value for key, value in entry.items() if key in KnownGpu.__annotations__}
        gpus.append(
            KnownGpu(
                **{"bus_gbps": pcie_gbps(*entry.get("pcie", (4, 0)))} | figures,
                shares=table["shares"][entry["family"]],
                words=frozenset(_words(entry.get("key", entry["name"]))),
            )
        )
    return tuple(gpus)


def by_driver_name(gpu_name: str) -> KnownGpu | None:
    """The entry for a driver's product name; None: it is not listed, or is a part of a GPU."""
    words = _words(gpu_name)
    if words & _LESSER_MODELS:
        return None
    listed = [g for g in known_gpus() if g.words <= words and not (words - g.words) & _OTHER_MODELS]
    return max(listed, key=lambda gpu: len(gpu.words), default=None)


def named_gpu(text: str) -> KnownGpu:
    """The entry that a user means: `4090`, `rtx4090`, `H100 PCIe`, or a driver's product name.

    Raises InputError: no entry fits, or its memory differs from the text's.
    """
    by_name = {_squeezed(name): gpu for gpu in known_gpus() for name in (gpu.name, *gpu.also)}
    if (gpu := by_name.get(_squeezed(text))) is not None:
        return gpu
    if (gpu := by_driver_name(text)) is not None:
        for size in map(int, re.findall(r"(\d+) ?g(?:i?b)?\b", text.lower())):
            differs = max(size / gpu.memory_gib, gpu.memory_gib / size) > 1.15
            # A far larger size is that of the host's memory (GH200 480GB).
            if differs and size < 3 * gpu.memory_gib:
                raise InputError(
                    f"GPU {text!r}: {gpu.name} is listed with {gpu.memory_gib:g} GiB; give --gpu "
                    f"'{gpu.name}' and --device-memory {size}GiB"
                )
        return gpu
    words = _words(text)
    close = [gpu.name for gpu in known_gpus() if words and words <= gpu.words]
    if not close:
        similar = difflib.get_close_matches(_squeezed(text), by_name, n=3, cutoff=0.5)
        close = [by_name[name].name for name in similar]
    hint = f"did you mean {' or '.join(close)}?"
    if not close:
        hint = f"known are {', '.join(gpu.name for gpu in known_gpus())}"
    raise InputError(f"unknown GPU {text!r}; {hint} (name the most similar and give its memory)")


def most_memory() -> int:
    """The largest memory of a GPU in `gpus.json`, in bytes."""
    return int(max(gpu.memory_gib for gpu in known_gpus()) * GIB)


def pcie_gbps(generation: int, lanes: int) -> float:
    """The nominal GB/s of a PCIe link in one direction: 2 GB/s a lane in generation 4."""
    return 2.0 * lanes * 2.0 ** (generation - 4)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - _MAKERS


def _squeezed(name: str) -> str:
    return re.sub(rf"{'|'.join(sorted(_MAKERS))}|[^a-z0-9]", "", name.lower())
