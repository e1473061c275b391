"""Optimizers on the demo's model and text, AdamW's kinds of states first: where the losses end.

    python -m benchmarks.optimizer_states [--steps 400] [--seeds 3] [--at-once 3]
        [--case adamw] [--case muon optimizer.name=muon optimizer.lr=2e-2 ...]
        [--set training.batch_size=4 ...] [--run run.yaml] [--name optimizer-states]
        [--packages transformers torch]

Every seed trains each case on the same batches from the same weights, `--at-once` runs in processes
of their own. It writes all curves so far to benchmarks/results/<name>-<machine>.json. At the end it
prints the differences from the first case, the step at which a case has come as far as that, and
the spread of the first case's seeds; and draws a picture of the curves beside.

With `--packages` the text is 24 MiB of the Python sources of these installed packages, in
`runs/packages/corpus`, and its tokenizer has 8,192 tokens: `optimizer_states_0.1b.yaml` reads it.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile
from typing import Any

from benchmarks.kernels import RESULTS, machine_name
from megatrain import config
from megatrain.base.units import MIB
from megatrain.base.whole_files import whole_folder
from megatrain.cli.demo import write_corpus_and_tokenizer
from megatrain.data import train_bpe_tokenizer
from megatrain.run_folder.layout import METRICS
from megatrain.telemetry.host import commit, environment
from megatrain.telemetry.metrics import read_metrics
from megatrain.train.loop import train

STATES = [[states, f"optimizer.states={states}"] for states in ("fp32", "bf16", "int8")]


PACKAGES = Path("runs/packages")


def write_packages(names: list[str], max_bytes: int = 24 * MIB) -> None:
    """Sources of installed packages, as much of each, and a tokenizer of every fourth file."""
    files: list[Path] = []
    for name in names:
        spec, left = find_spec(name), max_bytes // len(names)
        assert spec is not None and spec.origin is not None, f"{name} is not installed"
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            if 0 < path.stat().st_size <= left:
                left -= path.stat().st_size
                files.append(path)
    with whole_folder(PACKAGES, replace=True) as folder:
        (folder / "corpus").mkdir()
        for number, path in enumerate(files):
            copyfile(path, folder / f"corpus/{number:05d}-{path.stem}.txt")
        train_bpe_tokenizer(files[::4], 8192, folder / "tokenizer")


def curves(options: argparse.Namespace, which: tuple[int, list[str]]) -> dict[str, Any]:
    """Losses of all steps and of all evaluations of one run: a seed's, of a case."""
    seed, case = which
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *options.set,
            *case[1:],
            f"training.steps={options.steps}",
            f"training.eval_every={options.steps}",
            f"training.seed={seed}",
            f"output.folder={folder}/run",
        ]
        outcome = train(config.load(options.run, overrides), "compare")
        records = list(read_metrics(outcome.folder / METRICS))
    return {
        "states": case[0],
        "seed": seed,
        "losses": [round(each["loss"], 5) for each in records if "loss" in each],
        "eval_losses": [round(each["eval_loss"], 5) for each in records if "eval_loss" in each],
    }


def end_of(run: dict[str, Any]) -> float:
    """The mean loss of a run's last tenth."""
    losses = run["losses"]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def steps_to(run: dict[str, Any], loss: float) -> int | None:
    """The first step whose tenth of a run before it has a mean loss as low."""
    losses, tenth = run["losses"], max(1, len(run["losses"]) // 10)
    means = (statistics.fmean(losses[end - tenth : end]) for end in range(tenth, len(losses) + 1))
    return next((tenth + after for after, mean in enumerate(means) if mean <= loss), None)


def table(runs: list[dict[str, Any]]) -> str:
    """Differences from the first case, seed by seed, and the spread of its seeds."""
    first = runs[0]["states"]
    plain = {run["seed"]: end_of(run) for run in runs if run["states"] == first}
    runs = [run for run in runs if run["seed"] in plain]
    mean = statistics.fmean(plain.values())
    spread = (max(plain.values()) - min(plain.values())) / mean
    lines = [f"{first:<9}{mean:.4f} in the last tenth, seeds within {spread:.2%}"]
    for case in dict.fromkeys(run["states"] for run in runs if run["states"] != first):
        own = [run for run in runs if run["states"] == case]
        ends = [end_of(run) / plain[run["seed"]] - 1 for run in own]
        told = ", ".join(f"{end:+.2%}" for end in ends)
        reached = ", ".join(str(steps_to(run, plain[run["seed"]])) for run in own)
        lines.append(f"{case:<9}{statistics.fmean(ends):+.2%} on average ({told}), at {reached}")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves, each a mean over 20 steps and all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for states in dict.fromkeys(run["states"] for run in runs):
        curves = [run["losses"] for run in runs if run["states"] == states]
        steps = range(0, len(curves[0]), 20)
        means = [statistics.fmean(x for each in curves for x in each[s : s + 20]) for s in steps]
        axes.plot([s + 10 for s in steps], means, label=states)
    axes.set(xlabel="step", ylabel="training loss, mean of the seeds")
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description="Compare optimizers.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--case", nargs="+", action="append", help="a name, and keys of its own")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the run file")
    parser.add_argument("--run", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--packages", nargs="+", help="whose sources are the text")
    parser.add_argument("--name", default="optimizer-states")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.packages:
        write_packages(options.packages)
    else:
        write_corpus_and_tokenizer()
    machine, cases = environment("auto"), options.case or STATES
    case = {"run": options.run.name, "steps": options.steps, "set": options.set}
    case |= {"packages": [f"{name} {version(name)}" for name in options.packages or ()]}
    record = {"case": case, "commit": commit(), "machine": machine}
    path = options.out / f"{options.name}-{machine_name(machine)}.json"
    runs: list[dict[str, Any]] = []
    order = {name: place for place, (name, *_) in enumerate(cases)}
    with ProcessPoolExecutor(options.at_once, get_context("spawn")) as pool:
        asked = product(range(options.seeds), cases)
        for done in as_completed(pool.submit(curves, options, which) for which in asked):
            if (error := done.exception()) is not None:
                print(f"a run failed: {error}", flush=True)
                continue
            runs = sorted(
                [*runs, done.result()], key=lambda run: (run["seed"], order[run["states"]])
            )
            path.write_text(json.dumps(record | {"runs": runs}) + "\n", encoding="utf-8")
    print(table(runs), flush=True)
    draw(runs, path.with_suffix(".png"))
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
