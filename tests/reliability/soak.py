"""Long runs that are killed, stopped, resumed elsewhere, evaluated and saved all the time.

`python -m tests.reliability.soak [STEPS [SEED ...]]`: toy runs of 600 steps, one for each seed.
Nine seeds in a row have all the optimizer rules; a seed also draws the precision and whether
gradients are clipped. Each process takes some steps until it is killed, stopped, or asked to save,
and each resume draws another placement: what rests on the device, on the host and on a disk. In the
end model and log equal those of the uninterrupted run, bit for bit: placements change no bit on the
CPU. Memory, threads and open files of the processes must not grow with their steps.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from megatrain.data import train_bpe_tokenizer
from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import SENTENCES, sets
from tests.reliability.cases import (
    Run,
    checkpoint_steps,
    logged,
    model_bytes,
    start_run,
    toy_run,
)

PER_PROCESS = (25, 250)  # steps, about: short ones resume often, long ones show what grows
MIB = 1 << 20
# Allowed growth, of what there is at least: a loader's second thread may start late, a save has
# threads and files for a while. One lost in each save would be eight.
MORE = {"memory": 24 * MIB, "threads": 2, "files": 4}


# With layers in fp32 a master has all of its bits, so that only bf16 layers can have 24 of them.
RULES: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "adamw", "states": "bf16"},
    {"name": "adamw", "states": "int8"},
    {"name": "adamw", "states": "int8", "master": 24},
    {"name": "lion", "lr": 1e-3},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "muon", "adamw_lr": 1e-3},
    {"name": "muon", "adamw_lr": 1e-3, "clip": "all"},
]
TILES = ("embedding", "layer 0", "layer 1", "head")


def learning(choice: random.Random, rule: dict[str, Any]) -> dict[str, Any]:
    """What decides what is learned, so that no resume may change it."""
    bf16 = "master" in rule or choice.random() < 0.5
    return {
        **{f"optimizer__{key}": value for key, value in rule.items()},
        "engine__precision": "bf16" if bf16 else "fp32",
        "training__max_grad_norm": choice.choice([None, 0.5]),
    }


def placement(choice: random.Random) -> dict[str, Any]:
    slots, passes = choice.randint(1, 4), choice.randint(1, 2)
    disk = ("disk_moments", "disk_remainder", "disk_weights")
    return {
        "slots": slots,
        "prefetch": choice.choice([None, *range(slots)]),
        "layer_inputs": choice.choice(["device", "host"]),
        "host_grad_buffers": choice.randint(1, 3),
        "head_tokens": 4096,
        "passes": passes,
        "keep_rows": passes == 2 or choice.random() < 0.5,
        "resident": choice.sample(TILES, choice.randint(0, len(TILES))),
        "keep_weights": choice.randint(0, 3),
        "save_activations": choice.randint(0, 2),
        "offload_activations": choice.randint(0, 2),
        **{name: choice.randint(0, 4) for name in disk},
    }


def usage(pid: int) -> dict[str, int]:
    """What a process takes now."""
    process = psutil.Process(pid)
    taken = process.memory_info()
    memory = taken.rss - taken.shared
    return {"memory": memory, "threads": process.num_threads(), "files": process.num_fds()}


def watch(run: Run, log: Path, stop_at: int) -> list[dict[str, int]]:
    """Wait until the run has logged `stop_at`, or has ended; what it took every half second."""
    seen = []
    while True:
        try:
            seen.append(usage(run.pid))
        except psutil.Error:  # it has ended
            return seen
        if last_step(log) >= stop_at:
            return seen
        time.sleep(0.1)


def last_step(log: Path) -> int:
    return (
        max((record.get("step", 0) for record in read_metrics(log)), default=0)
        if log.exists()
        else 0
    )


def check_flat(seen: list[dict[str, int]], more: dict[str, int]) -> None:
    """Late in its life a process takes no more than early, but for moments (a save opens files)."""
    if len(seen) < 30:
        return
    for name in more:
        values = [each[name] for each in seen]
        # The least of its middle, when all is there that it needs, and of its end.
        before = min(values[len(values) // 3 : len(values) // 2])
        after = min(values[-len(values) // 4 :])
        assert after <= before + more[name], f"{name} grew from {before} to {after}"


def soak(folder: Path, steps: int, seed: int) -> None:
    """Raises AssertionError where the promise does not hold."""
    choice, rule = random.Random(seed), RULES[seed % len(RULES)]
    learned = learning(choice, rule)
    print(f"seed {seed}: {learned}", flush=True)
    tokenizer = folder / "tokenizer"
    (folder / "corpus.txt").write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([folder / "corpus.txt"], 300, tokenizer)
    choices = {"training__steps": steps, "training__eval_every": 23, "checkpoint__every": 17}
    choices |= learned
    for name in ("whole", "soaked"):
        toy_run(folder / name, tokenizer, **choices, checkpoint__keep=2, output__log_every=100)
    started = time.monotonic()
    start_run("train", folder / "whole" / "run.yaml", log=folder / "log").finish()
    print(f"uninterrupted: {time.monotonic() - started:.0f} s", flush=True)
    run_file, log = folder / "soaked" / "run.yaml", folder / "soaked" / "run" / "metrics.jsonl"
    processes = 0
    while not (folder / "soaked" / "run" / "model").exists():
        newest = max(checkpoint_steps(folder / "soaked" / "run"), default=0)
        place = placement(choice)
        engine = sets(engine__placement=place, engine__disk=str(folder))
        arguments = ["train", run_file, "--resume", *engine]
        run = start_run(*arguments, log=folder / f"log-{processes}")
        about = choice.choice(PER_PROCESS)
        seen = watch(run, log, newest + choice.randint(about // 2, about * 3 // 2))
        deed = choice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        if choice.random() < 0.5:
            run.signal_if_there(signal.SIGUSR1)
        run.signal_if_there(deed)
        code = run.wait()
        assert code in (0, -signal.SIGKILL), run.output
        check_flat(seen, MORE)
        processes += 1
        most = {name: max((s[name] for s in seen), default=0) for name in MORE}
        print(f"process {processes}: step {last_step(log)}, {deed.name}, {most}", flush=True)
    assert logged(folder / "soaked" / "run") == logged(folder / "whole" / "run")
    assert model_bytes(folder / "soaked" / "run") == model_bytes(folder / "whole" / "run")
    took = time.monotonic() - started
    print(f"seed {seed}: {steps} steps in {processes} processes, {took:.0f} s: equal", flush=True)


def main() -> None:
    steps, *seeds = [int(argument) for argument in sys.argv[1:]] or [600]
    for seed in seeds or range(len(RULES)):
        folder = Path(tempfile.mkdtemp(prefix=f"megatrain-soak-{seed}-"))
        soak(folder, steps, seed)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
