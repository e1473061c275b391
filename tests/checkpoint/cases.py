"""Engines to save, writers to slow down, and a CPU whose host streams are threads."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain import Engine, Placement
from megatrain.checkpoint import files
from megatrain.checkpoint.manifest import signed
from megatrain.device import Buffer, CpuDevice
from megatrain.device.base import HOST_STREAMS, Buffers, Work
from megatrain.device.host_stream import HostStream
from tests.families.plain import Step
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters


def engine_of(**options: Any) -> Engine:
    """A tiny engine; `model` and `sizes` choose the model."""
    model = options.pop("model", None) or llama(**options.pop("sizes", {}))
    return make_engine(model, **options)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def add_code(folder: Path, first: str = "") -> None:
    """Let the saved Llama in a folder be of a class whose code lies there and does `first`."""
    tree = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    tree |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "own.py").write_text(first + CODE)


def batches(count: int) -> list[Step]:
    return make_batches(count, ((2, 8), (1, 5)))


def state(engine: Engine) -> dict[str, Tensor]:
    """Every number that is saved of the tiles."""
    found = {f"master {name}": master for name, master in masters(engine).items()}
    for tile in store_of(engine).tiles:
        for number, moment in enumerate(tile.states.values()):
            found[f"moment {number} of {tile.name}"] = moment.values().clone()
        found[f"version of {tile.name}"] = torch.tensor(tile.version)
    return found


class ThreadedDevice(CpuDevice):
    """Host streams are threads, as beside a GPU; device work is done by the caller at once."""

    def __init__(self) -> None:
        self._workers = {
            name: HostStream(name, torch.zeros(1, dtype=torch.int32)) for name in HOST_STREAMS
        }

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        if stream in self._workers:
            return self._workers[stream].put(work)
        return work()

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        self.run(stream, "copy", lambda: CpuDevice.copy(self, stream, to, source, numel))

    def record(self, stream: str) -> Any:
        worker = self._workers.get(stream)
        return None if worker is None else (worker, worker.mark())

    def wait(self, stream: str, event: Any, why: str) -> None:
        if event is not None:
            self.run(stream, why, lambda: event[0].wait(event[1]))

    def synchronize(self, event: Any, why: str) -> None:
        if event is not None:
            event[0].wait(event[1])
        for worker in self._workers.values():
            worker.check()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class SlowWrites:
    """The file layer, each write of which takes a while, or waits until it may go on."""

    def __init__(self, monkeypatch, seconds: float = 0.0) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.count = 0
        write = files.NewFile.write

        def slow(file: files.NewFile, data: Any, offset: int) -> None:
            self.count += 1
            assert self.may_go_on.wait(200), "nobody has let the writers go on"
            time.sleep(seconds)
            write(file, data, offset)

        monkeypatch.setattr(files.NewFile, "write", slow)


def tiny_pool(blocks: int, **choices: Any) -> Placement:
    return Placement(slots=1, save_bytes=blocks * 4096, **choices)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def change(folder: Path, edit: Any) -> None:
    """Edit the manifest as somebody would who knows how it is signed."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(signed(content)))
