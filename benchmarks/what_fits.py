"""`python -m benchmarks.what_fits`: the largest model for a GPU and its host's memory, by `plan`.

Nothing is measured: each cell is what `megatrain plan` foretells for a step of 64 rows of 1,024
tokens with exact clipping, by the GPU's listed rates: of all parameters, and of LoRA of rank 16 on
a bf16 base. Writes benchmarks/results/what-fits.json, of which `python -m benchmarks.tables` makes
the README's table.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import tables
from megatrain.cli.models import SHAPES
from megatrain.telemetry.host import commit

GPUS = {"RTX 4090": 16, "A100 80GB": 32, "H100 SXM": 32, "H200": 32}  # with usual cores
HOST_GIB = (64, 128, 256, 512, 1024)
TOKENS, LORA, DOES_NOT_FIT = 64 * 1024, 16, 3
FILE = Path("what-fits.json")


def plan(shape: str, gpu: str, host_gib: int, rank: int) -> dict[str, Any] | None:
    """What `megatrain plan --json` says; None: it does not fit."""
    machine = f"--gpu={gpu}", f"--host-memory={host_gib}GiB", f"--cores={GPUS[gpu]}"
    asked = "plan", f"--model={shape}", *machine, f"--tokens={TOKENS}", f"--lora-r={rank}", "--json"
    done = subprocess.run([sys.executable, "-m", "megatrain", *asked], capture_output=True)
    if done.returncode == DOES_NOT_FIT:
        return None
    done.check_returncode()
    return json.loads(done.stdout)["forecast"]


def largest(gpu: str, host_gib: int, rank: int, most: int) -> tuple[int, dict[str, Any]] | None:
    """Number and forecast of the largest shape, of the first `most`, that fits."""
    for number in reversed(range(most)):
        told = plan(list(SHAPES)[number], gpu, host_gib, rank)
        if told is not None:
            return number, told
    return None


def column(gpu: str, rank: int) -> list[dict[str, Any]]:
    """The cells of a GPU; less memory never holds a larger model, which spares most plans."""
    cells, most = [], len(SHAPES)
    for host_gib in sorted(HOST_GIB, reverse=True):
        found = largest(gpu, host_gib, rank, most)
        if found is None:
            break
        number, told = found
        most = number + 1
        cell = {"gpu": gpu, "cores": GPUS[gpu], "host_gib": host_gib, "lora_r": rank}
        cell |= {"shape": list(SHAPES)[number], "tokens_per_second": told["tokens_per_second"]}
        print(cell, flush=True)
        cells.append(cell)
    return cells


def main() -> None:
    """Plan all columns, as many at once as there are cores for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=tables.RESULTS / FILE)
    out = parser.parse_args().out
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        columns = pool.map(lambda each: column(*each), product(GPUS, (0, LORA)))
        cells = [cell for cells in columns for cell in cells]
    result = {"tokens_per_step": TOKENS, "commit": commit(), "cells": cells}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
