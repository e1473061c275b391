"""Seconds of steps of DPO beside steps of cross entropy on the same tokens, in one engine.

Random weights of a shape (all layers alike) and random tokens; replies are the second half of each
row. The reference's log-probabilities are given, as a run keeps them. Prints a line for each loss
and the ratio of their rates; writes JSON to `--out`.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.options import case_of, parse, write
from megatrain import AdamW, Engine
from megatrain.cli.models import qwen2_config
from megatrain.loss import CROSS_ENTROPY, DPO, IGNORED
from megatrain.source.source import Alike
from megatrain.telemetry.host import environment


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the measured steps of both, in the placement that was chosen for DPO."""
    length, rows = chosen.sequence_length, chosen.sequences
    shape = Alike(qwen2_config(chosen.shape, length))
    device = None if chosen.device == "auto" else chosen.device
    engine = Engine(
        shape,
        optimizer=AdamW(lr=1e-6, states=chosen.states),
        tokens_per_step=rows * length,
        sequence_length=length,
        loss=DPO(),
        device=device,
        host_memory=chosen.host_memory,
    )
    size = engine.micro_batch or 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(engine.vocab_size, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.arange(length) < length // 2, IGNORED)
    plain = [
        {"input_ids": own, "labels": learnt}
        for own, learnt in zip(ids.split(size), labels.split(size), strict=True)
    ]
    row = torch.arange(rows, dtype=torch.float32)[:, None].expand(ids.shape)
    pairs = (row // 2).split(size), (row % 2 == 0).float().split(size), engine.logprobs(plain)
    names = "pair", "chosen", "reference_logp"
    given = [dict(zip(names, each, strict=True)) for each in zip(*pairs, strict=True)]
    compared = [micro | beside for micro, beside in zip(plain, given, strict=True)]
    found: dict[str, Any] = {"placement": engine.placement.as_dict(), "micro_batch": size}
    for name, step, loss in (("sft", plain, CROSS_ENTROPY), ("dpo", compared, DPO())):
        times = []
        for _ in range(chosen.warmup + chosen.steps):
            began = time.perf_counter()
            engine.step(step, loss)
            engine.flush()
            times.append(time.perf_counter() - began)
        seconds = median(times[chosen.warmup :])
        found[name] = {"step_seconds": times, "median_seconds": seconds}
        print(f"{name} {seconds:.3f} s, {rows * length / seconds:,.0f} tokens/s", flush=True)
    engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    chosen = parse(
        __doc__, arguments,
        shape="7b", sequences=32, sequence_length=1024, states="fp32",
        steps=3, warmup=2, device="auto", host_memory=str, out=Path,
    )  # fmt: skip
    found = measure(chosen)
    found["rate"] = found["sft"]["median_seconds"] / found["dpo"]["median_seconds"]
    print(f"DPO has {found['rate']:.2f} of the rate")
    found |= {"case": case_of(chosen), "environment": environment(chosen.device)}
    write(chosen.out, found)


if __name__ == "__main__":
    main()
