"""A long run that is killed, stopped, resumed elsewhere, evaluated and saved all the time.

`python -m tests.reliability.soak [STEPS]`: a toy run of 5,000 steps under random placements, each
process doing a few hundred of them until it is killed, stopped, or asked to save. In the end its
model and its log equal those of the uninterrupted run, bit for bit: placements change no bit on the
CPU. Memory, threads and open files of the processes must not grow with their steps.
"""

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatrain.data import train_bpe_tokenizer
from tests.cli.cases import SENTENCES, sets
from tests.reliability.cases import (
    Run,
    Zygote,
    checkpoint_steps,
    logged,
    model_bytes,
    toy_run,
)

PER_PROCESS = 250  # steps, about
MIB = 1 << 20
# Allowed growth, of what there is at least: a loader's second thread may start late, a save has
# threads and files for a while. One lost in each save would be eight.
MORE = {"memory": 24 * MIB, "threads": 2, "files": 4}


def placement(choice: random.Random) -> dict[str, Any]:
    return {
        "slots": choice.randint(1, 4),
        "layer_inputs": choice.choice(["device", "host"]),
        "host_grad_buffers": choice.randint(1, 3),
        "head_tokens": 4096,
        "disk_moments": choice.randint(0, 4),
        "disk_remainder": choice.randint(0, 2),
        "disk_weights": choice.randint(0, 2),
    }


def usage(pid: int) -> dict[str, int]:
    """What a process takes now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "memory": int(status["RssAnon"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def watch(run: Run, log: Path, stop_at: int) -> list[dict[str, int]]:
    """Wait until the run has logged `stop_at`, or has ended; what it took every half second."""
    seen = []
    while True:
        try:
            seen.append(usage(run.pid))
        except (FileNotFoundError, KeyError, ProcessLookupError):  # it has ended
            return seen
        if last_step(log) >= stop_at:
            return seen
        time.sleep(0.1)


def last_step(log: Path) -> int:
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().split(b"\n")[1:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def check_flat(seen: list[dict[str, int]], more: dict[str, int]) -> None:
    """Late in its life a process takes no more than early, but for moments (a save opens files)."""
    if len(seen) < 30:
        return
    for name in more:
        before, after = early_and_late([s[name] for s in seen])
        assert after <= before + more[name], f"{name} grew from {before} to {after}"


def early_and_late(values: list[int]) -> tuple[int, int]:
    """The least of a process's middle, when all is there that it needs, and of its end."""
    return min(values[len(values) // 3 : len(values) // 2]), min(values[-len(values) // 4 :])


def soak(folder: Path, steps: int, seed: int = 0) -> None:
    """Raises AssertionError where the promise does not hold."""
    choice, zygote = random.Random(seed), Zygote()
    tokenizer = folder / "tokenizer"
    (folder / "corpus.txt").write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([folder / "corpus.txt"], 300, tokenizer)
    choices = {"training__steps": steps, "training__eval_every": 23, "checkpoint__every": 17}
    for name in ("whole", "soaked"):
        toy_run(folder / name, tokenizer, **choices, checkpoint__keep=2, output__log_every=100)
    started = time.monotonic()
    zygote.start("train", folder / "whole" / "run.yaml", log=folder / "log").finish()
    print(f"uninterrupted: {time.monotonic() - started:.0f} s", flush=True)
    run_file, log = folder / "soaked" / "run.yaml", folder / "soaked" / "run" / "metrics.jsonl"
    processes = 0
    while not (folder / "soaked" / "run" / "model").exists():
        newest = max(checkpoint_steps(folder / "soaked" / "run"), default=0)
        place = placement(choice)
        engine = sets(engine__placement=place, engine__disk=str(folder))
        arguments = ["train", run_file, "--resume", *engine]
        run = zygote.start(*arguments, log=folder / f"log-{processes}")
        seen = watch(run, log, newest + choice.randint(PER_PROCESS // 2, PER_PROCESS * 3 // 2))
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
    zygote.close()
    print(f"{steps} steps in {processes} processes, {time.monotonic() - started:.0f} s: equal")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="megatrain-soak-"))
    soak(folder, int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
