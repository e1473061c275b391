"""Tokens a second of TRL's SFTTrainer on the engine beside those of `megatrain train`.

The same random weights of a shape, the same rows of tokens, micro-batches, optimizer and precision,
each in a process of its own; seconds from one step's end to the next. Prints a line for each, and
the ratio of their rates; writes JSON to `--out`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import megatrain
from benchmarks.options import case_of, parse, write
from megatrain.cli.models import qwen2_config
from megatrain.data import train_bpe_tokenizer
from megatrain.integrations import StreamedTrainer
from megatrain.telemetry.host import environment

_NUMBERS = " ".join(map(str, range(2000)))


class Ends(TrainerCallback):
    """When each step ended, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def between(self, warmup: int) -> list[float]:
        """Seconds of the steps after the first ones."""
        times = self.times[warmup - 1 :]
        return [end - start for start, end in pairwise(times)]


def written(chosen: argparse.Namespace, folder: Path) -> None:
    """The model, its tokenizer and the text."""
    (folder / "numbers.txt").write_text(_NUMBERS)
    train_bpe_tokenizer([folder / "numbers.txt"], 300, folder / "model")
    torch.manual_seed(0)
    made = qwen2_config(chosen.shape, chosen.sequence_length)
    with torch.device(chosen.device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    text = AutoTokenizer.from_pretrained(folder / "model")(_NUMBERS)["input_ids"]
    wanted = (chosen.steps + chosen.warmup) * chosen.sequences * chosen.sequence_length
    line = json.dumps({"text": _NUMBERS}) + "\n"
    (folder / "text.jsonl").write_text(line * (2 + wanted // len(text)))


def by_run_file(chosen: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds of the steps of `megatrain train`."""
    ends = Ends()
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"kind": "text", "path": str(folder / "text.jsonl"),
                 "sequence_length": chosen.sequence_length},
        "optimizer": {"lr": 1e-6},
        "schedule": {"name": "constant"},
        "training": {"steps": chosen.steps + chosen.warmup, "batch_size": chosen.sequences,
                     "micro_batch_size": chosen.micro_batch},
        "checkpoint": {"every": None},
        "engine": {"device": chosen.device},
        "output": {"folder": str(folder / "run"), "log_every": 1},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(tree))  # which is YAML, too
    megatrain.run(folder / "run.json", on_record=ends.on_step_end)
    return ends.between(chosen.warmup)


def by_script(chosen: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds of the steps of SFTTrainer."""
    from datasets import Dataset

    trl: Any = import_module("trl")  # whose names mypy does not see
    streamed = type("Streamed", (StreamedTrainer, trl.SFTTrainer), {})
    ends, length = Ends(), chosen.sequence_length
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer(_NUMBERS)["input_ids"]
    count = (chosen.steps + chosen.warmup) * chosen.sequences
    ids = ids * (1 + count * length // len(ids))
    rows = [{"input_ids": ids[n * length : (n + 1) * length]} for n in range(count)]
    settings = trl.SFTConfig(
        output_dir=str(folder / "script"), max_steps=chosen.steps + chosen.warmup,
        per_device_train_batch_size=chosen.micro_batch, max_length=length,
        gradient_accumulation_steps=chosen.sequences // chosen.micro_batch, learning_rate=1e-6,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=chosen.device == "cpu", bf16=chosen.device != "cpu", disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    trainer = streamed(
        model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[ends],
    )  # fmt: skip
    del model
    trainer.train()
    return ends.between(chosen.warmup)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    chosen = parse(
        __doc__, arguments,
        shape="1.5b", sequences=32, sequence_length=1024, micro_batch=16, warmup=4, steps=10,
        device="cuda", out=Path,
    )  # fmt: skip
    found: dict[str, Any] = {"case": case_of(chosen), "environment": environment(chosen.device)}
    with tempfile.TemporaryDirectory() as folder:
        ways = (("written", written), ("megatrain train", by_run_file), ("SFTTrainer", by_script))
        for name, way in ways:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                times = alone.submit(way, chosen, Path(folder)).result()
            if times is not None:
                seconds = median(times)
                found[name] = {"step_seconds": times, "median_seconds": seconds}
                rate = chosen.sequences * chosen.sequence_length / seconds
                print(f"{name}: {seconds:.3f} s, {rate:,.0f} tokens/s", flush=True)
    found["rate"] = (
        found["megatrain train"]["median_seconds"] / found["SFTTrainer"]["median_seconds"]
    )
    print(f"SFTTrainer has {found['rate']:.3f} of the rate")
    write(chosen.out, found)


if __name__ == "__main__":
    main()
