"""Seconds of a GRPO step by stage, with replies made by the engine itself.

Random weights of a shape (all layers alike), random prompts, a reward that costs nothing; the model
ends hardly any reply, so each has as many tokens as it may. Prints a line for each step, and writes
JSON to `--out`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.options import case_of, parse, write
from megatrain import Engine
from megatrain.cli.models import qwen2_config
from megatrain.config import Config, validate
from megatrain.data import StepLoader, load_tokenizer, open_prompts, train_bpe_tokenizer
from megatrain.forecast.workload import Workload
from megatrain.source.source import Alike
from megatrain.telemetry.host import environment
from megatrain.train.rollouts import Rewards, Rollouts

_LEAD = 8  # tokens at a prompt's beginning, and what fills the width up
_STAGES = ("generate", "reward", "logprobs", "train", "total")
_REWARD = (
    "def reward(completion_ids, **kwargs):\n    return [ids[0] % 7 for ids in completion_ids]\n"
)


def configured(chosen: argparse.Namespace, folder: Path) -> Config:
    """The run file of what is measured; writes its prompts and its reward."""
    text = folder / "numbers.txt"
    text.write_text(" ".join(map(str, range(1000))))
    train_bpe_tokenizer([text], 300, folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    rows = chosen.prompts * (chosen.steps + chosen.warmup)
    letters = torch.randint(26, (rows, chosen.prompt), generator=generator) + ord("a")
    prompts = ["".join(map(chr, row)) for row in letters.tolist()]  # which no merge shortens
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(_REWARD)
    length = chosen.prompt + _LEAD + chosen.new
    tree = {
        "model": {"config": {"model_type": "qwen2"}, "tokenizer": str(folder / "tokenizer")},
        "data": {"path": str(folder / "prompts.jsonl"), "sequence_length": length},
        "loss": {"name": "grpo", "num_generations": chosen.replies,
                 "max_completion_length": chosen.new},
        "rollout": {"rewards": [f"{folder / 'reward.py'}:reward"]},
        "optimizer": {"lr": 1e-6, "states": chosen.states},
        "training": {"steps": chosen.steps + chosen.warmup, "batch_size": chosen.prompts},
        "engine": {"device": chosen.device, "device_memory": chosen.device_memory,
                   "host_memory": chosen.host_memory},
    }  # fmt: skip
    return validate(tree, "the benchmark")


def measure(chosen: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Seconds of each stage of each step, and what the engine takes."""
    tokenizer = load_tokenizer(str(config.model.tokenizer))
    shape = qwen2_config(chosen.shape, config.data.sequence_length)
    workload = Workload.of_run(config)
    began = time.perf_counter()
    engine = Engine(
        Alike(shape),
        **workload.for_engine,
        device=None if chosen.device == "auto" else chosen.device,
    )
    build = time.perf_counter() - began
    prompts = open_prompts(
        config.data.path, tokenizer=tokenizer, longest=chosen.prompt + _LEAD, fields={},
        bad_rows="stop", drop=False, vocab_size=shape.vocab_size,
    )  # fmt: skip
    rows = max(1, (engine.micro_batch or 16) // chosen.replies)
    loader = StepLoader(prompts, rows_per_step=chosen.prompts, rows_per_micro_batch=rows)
    total = chosen.steps + chosen.warmup
    rollouts = Rollouts(config, Rewards(config.rollout), engine, tokenizer, loader, None, total)
    steps = []
    for step in range(1, total + 1):
        began = time.perf_counter()
        made, told = rollouts.take(step)
        result = engine.step(made, config.loss.loss())
        seconds = {name: told[f"{name}_seconds"] for name in _STAGES[:3]}
        seconds |= {"train": result.seconds, "total": time.perf_counter() - began}
        steps.append(seconds | {"loss": result.loss, "tokens": result.tokens})
        lengths = told["completions/mean_length"]
        parts = "  ".join(f"{name} {seconds[name]:.2f}" for name in _STAGES)
        print(f"step {step}: {parts} s; {lengths:.0f} tokens a reply", flush=True)
    engine.flush()
    found = {"steps": steps, "build_seconds": build, "memory": engine.memory()}
    found |= {"placement": engine.placement.as_dict(), "micro_batch": engine.micro_batch}
    engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    chosen = parse(
        __doc__, arguments,
        shape="7b", prompts=8, replies=2, prompt=256, new=256, states="int8", steps=3, warmup=2,
        device="auto", device_memory=str, host_memory=str, out=Path,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen, configured(chosen, Path(folder)))
    measured = found["steps"][chosen.warmup :]
    found["median"] = {name: median(each[name] for each in measured) for name in _STAGES}
    print("  ".join(f"{name} {seconds:.2f}" for name, seconds in found["median"].items()), "s")
    found |= {"case": case_of(chosen), "environment": environment(chosen.device)}
    write(chosen.out, found)


if __name__ == "__main__":
    main()
