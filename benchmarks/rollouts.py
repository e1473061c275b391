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

from megatrain import Engine
from megatrain.cli.shapes import qwen2_config
from megatrain.config import Config, validate
from megatrain.data import StepLoader, load_tokenizer, open_prompts, train_bpe_tokenizer
from megatrain.forecast.workload import Workload
from megatrain.source.source import Alike
from megatrain.telemetry.environment import environment
from megatrain.train.rewards import Rewards
from megatrain.train.rollouts import Rollouts

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--replies", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a reply")
    parser.add_argument("--states", default="int8")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--device-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    chosen = parser.parse_args(arguments)
    case = {name: value for name, value in vars(chosen).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen, configured(chosen, Path(folder)))
    measured = found["steps"][chosen.warmup :]
    found["median"] = {name: median(each[name] for each in measured) for name in _STAGES}
    print("  ".join(f"{name} {seconds:.2f}" for name, seconds in found["median"].items()), "s")
    if chosen.out is not None:
        found |= {"case": case, "environment": environment(chosen.device)}
        chosen.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
