"""`python -m benchmarks.one_memory`: a CPU's memory beyond the planes, in steps and in a load.

    python -m benchmarks.one_memory --what step --slots 0 --out step.json
    python -m benchmarks.one_memory --what load --out load.json

A step trains 8 of the 24 layers of Qwen2.5-0.5B with a vocabulary of 32,768, in fp32. A load opens
a model of 0.9 billion parameters in bf16, written here to seven files, for LoRA. The process of a
case does nothing else, so the peak is the case's; other programs slow the clock down, so
the time of the processor is told, too, and how busy the machine was.
"""

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.options import case_of, parse, peak_process_bytes, write
from megatrain.api import Engine
from megatrain.base.units import gib
from megatrain.cli.models import lora_adapter, qwen2_config
from megatrain.optim import AdamW
from megatrain.placement import Placement
from megatrain.source.source import Alike
from megatrain.telemetry.host import commit, environment

SHAPE, LAYERS, VOCABULARY = "0.5b", 8, 32_768
LOADED_SHAPE, LOADED_LAYERS = "1.5b", 10
PLANES = ("weights", "remainder", "moments", "gradients")
SAMPLES_A_SECOND = 50
WRITTEN = "import sys; from benchmarks.one_memory import write_model; write_model(sys.argv[1])"


def measure_steps(case: dict[str, Any]) -> dict[str, Any]:
    """Steps of one micro-batch of random tokens."""
    rows, length = case["sequences"], case["sequence_length"]
    imported = peak_process_bytes()
    config = qwen2_config(SHAPE, length, LAYERS)
    config.vocab_size = VOCABULARY
    placement = Placement(slots=case["slots"], head_tokens=case["head_tokens"])
    options: dict[str, Any] = {"precision": "fp32", "device": "cpu", "placement": placement}
    generator = torch.Generator().manual_seed(0)
    seconds, of_processor = list[float](), list[float]()
    with Engine(
        Alike(config), optimizer=AdamW(), tokens_per_step=rows * length, **options
    ) as engine:
        for _ in range(case["warmup"] + case["steps"]):
            ids_BT = torch.randint(VOCABULARY, (rows, length), generator=generator)
            began, began_busy = time.perf_counter(), time.process_time()
            engine.step([{"input_ids": ids_BT, "labels": ids_BT}])
            seconds.append(time.perf_counter() - began)
            of_processor.append(time.process_time() - began_busy)
        peak, planes = peak_process_bytes(), planes_of(engine)
        measured, busy = (each[case["warmup"] :] for each in (seconds, of_processor))
        return {
            "shape": f"{SHAPE}, {LAYERS} layers, a vocabulary of {VOCABULARY}",
            "parameters": engine.num_parameters,
            "placement": engine.placement.as_dict(),
            "median_seconds": statistics.median(measured),
            "step_seconds": seconds,
            "median_processor_seconds": statistics.median(busy),
            "step_processor_seconds": of_processor,
            **memory(peak, planes, imported),
        }


def measure_load(case: dict[str, Any]) -> dict[str, Any]:
    """One load of a model that this process did not write."""
    imported = peak_process_bytes()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", WRITTEN, folder], check=True)
        files = sorted(Path(folder).glob("*.safetensors"))
        for path in files:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())  # dirty pages stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before, began = cached_bytes(files), time.perf_counter()
        with sampled(files) as samples:
            engine = Engine(
                folder,
                optimizer=AdamW(),
                adapter=lora_adapter(16),
                device="cpu",
                precision="bf16",
            )
        seconds, peak = time.perf_counter() - began, peak_process_bytes()
        with engine:
            return {
                "shape": f"{LOADED_SHAPE}, {LOADED_LAYERS} layers, untied",
                "files": len(files),
                "file_bytes": sum(path.stat().st_size for path in files),
                "parameters": engine.num_parameters,
                "seconds": seconds,
                "page_cache_bytes_before": before,
                "page_cache_peak_bytes": max(samples, default=0),
                "page_cache_bytes_after": cached_bytes(files),
                **memory(peak, planes_of(engine), imported),
            }


def planes_of(engine: Engine) -> int:
    """Bytes of the planes that an engine keeps in host memory."""
    found = engine.memory()
    return sum(found[f"host_{name}_bytes"] for name in PLANES)


def memory(peak: int, planes: int, imported: int) -> dict[str, int]:
    """The figures that the documents tell."""
    return {
        "host_peak_bytes": peak,
        "planes_bytes": planes,
        "beside_planes_bytes": peak - planes,
        "imported_bytes": imported,
    }


def write_model(folder: str) -> None:
    """A model of random weights in seven files."""
    config = qwen2_config(LOADED_SHAPE, layers=LOADED_LAYERS)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")


def cached_bytes(files: list[Path]) -> int:
    """Bytes of files that the page cache holds."""
    held = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            flat = np.frombuffer(mapped, np.uint8)
            present = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            places = ctypes.c_void_p(flat.ctypes.data), len(mapped)
            if ctypes.CDLL(None).mincore(*places, ctypes.c_void_p(present.ctypes.data)):
                raise OSError(f"{path}: the system does not say which pages it holds")
            held += mmap.PAGESIZE * int((present & 1).sum())
            del flat
    return held


@contextmanager
def sampled(files: list[Path]) -> Iterator[list[int]]:
    """The page cache of files, many times a second, within the `with` block."""
    samples, ended = list[int](), threading.Event()

    def sample() -> None:
        while not ended.wait(1 / SAMPLES_A_SECOND):
            samples.append(cached_bytes(files))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Measure and print one case."""
    chosen = parse(
        __doc__,
        what=["step", "load"],
        slots=0,
        head_tokens=1024,
        sequences=4,
        sequence_length=512,
        warmup=1,
        steps=3,
        out=Path,
    )
    case = case_of(chosen)
    if case["what"] == "load":
        case = {"what": "load"}
    psutil.cpu_percent()
    found = {"step": measure_steps, "load": measure_load}[case["what"]](case)
    result = {
        "benchmark": "one_memory",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "case": case,
        **found,
        "threads": torch.get_num_threads(),
        "busy_percent": psutil.cpu_percent(),  # of all cores meanwhile, this process counted
        "load_average": os.getloadavg(),
        "environment": environment("cpu"),
    }
    print(json.dumps({name: v for name, v in result.items() if name != "environment"}, indent=2))
    print(f"peak {gib(result['host_peak_bytes'])}, beside the planes", end=" ")
    print(gib(result["beside_planes_bytes"]))
    write(chosen.out, result)


if __name__ == "__main__":
    main()
