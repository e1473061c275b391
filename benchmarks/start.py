"""Times a start: from the command to the end of the first step, of a model in a folder.

    python -m benchmarks.start --shape 7b --folder /tmp/7b --sequences 96 --out start.json

Makes the folder if it is not there: random weights of Qwen2.5's shape in bf16, a file for each
layer. Then each of `--runs` processes in turn imports, opens the folder and takes two steps. The
first one compiles if torch's cache of compiled kernels (`TORCHINDUCTOR_CACHE_DIR`) is empty; the
later ones find it filled. The files of the folder may be in the system's page cache.
"""

import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.options import case_of, parse, write

STAGES = ("imports", "engine", "first step", "second step")


def make_folder(shape: str, folder: Path) -> None:
    """Write a model of a shape with random weights, which all layers share."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from megatrain.cli.models import qwen2_config

    config = qwen2_config(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = parameter
    config.save_pretrained(folder)
    of_layer: dict[str, torch.Tensor] = {}  # by the name within a layer, or outside of layers
    for file, parameters in files.items():
        tensors = {}
        for name, parameter in parameters.items():
            key = name.split(".", 3)[-1] if ".layers." in name else name
            if key not in of_layer:
                empty = torch.empty(parameter.shape, dtype=torch.bfloat16)
                of_layer[key] = empty.normal_(std=0.02)
            tensors[name] = of_layer[key]
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, parameters in files.items() for name in parameters}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def start(case: dict[str, Any], began: float) -> dict[str, float]:
    """Open the folder and take two steps; returns the seconds from `began` to each stage's end."""
    seconds = {}

    def note(stage: str) -> None:
        seconds[stage] = time.time() - began

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    import torch

    from megatrain import AdamW, Engine

    note("imports")
    rows, tokens = case["sequences"], case["sequence_length"]
    with Engine(
        case["folder"],
        optimizer=AdamW(states=case["states"]),
        tokens_per_step=rows * tokens,
        sequence_length=tokens,
        device=case["device"],
        device_memory=case["device_memory"] or None,
        host_memory=case["host_memory"] or None,
    ) as engine:
        note("engine")
        ids = torch.randint(engine.config.vocab_size, (rows, tokens))
        step = [{"input_ids": i, "labels": i} for i in ids.split(engine.micro_batch or rows)]
        for stage in ("first step", "second step"):
            engine.step(step)
            note(stage)
    return seconds


def measure(case: dict[str, Any]) -> list[dict[str, float]]:
    """Start `runs` processes, one after the other."""
    runs = []
    for number in range(case["runs"]):
        told = json.dumps([case, time.time()])
        command = [sys.executable, "-m", "benchmarks.start", "--child", told]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        shown = ", ".join(f"{stage} {runs[-1][stage]:.1f}" for stage in STAGES)
        print(f"run {number + 1}, seconds from the command to the end of: {shown}", flush=True)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse(
        __doc__, arguments, shape="7b", folder=Path, sequences=96, sequence_length=1024, runs=3,
        states=["fp32", "bf16", "int8"], device="auto", device_memory="", host_memory="",
        out=Path, child="",
    )  # fmt: skip
    if options.child:
        print(json.dumps(start(*json.loads(options.child))))
        return
    if not options.folder.exists():
        make_folder(options.shape, options.folder)
    case = {n: str(v) if n == "folder" else v for n, v in case_of(options).items() if n != "child"}
    runs = measure(case)

    from megatrain.telemetry.host import commit, environment

    later = [run["first step"] for run in runs[1:]] or [runs[0]["first step"]]
    result = {
        "benchmark": "start",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "case": case,
        "runs": runs,
        "first_run_seconds": runs[0]["first step"],
        "median_seconds": statistics.median(later),
        "spread_seconds": max(later) - min(later),
        "environment": environment(options.device),
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
