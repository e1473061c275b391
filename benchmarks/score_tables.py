"""`python -m benchmarks.score_tables`: the table and the picture of docs/results.md.

They are made from `benchmarks/results/scores-*.json`, which `benchmarks.scores` writes. Accuracies
are means of the seeds, with the 95 % interval of Wilson for the number of held-out questions.
"""

import json
from collections import defaultdict
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "before": "before any training",
    "full": "all parameters",
    "pytorch": "the same in plain PyTorch",
    "trl": "the same by TRL's SFTTrainer",
    "int8": "all parameters, int8 states",
    "fp8": "all parameters, fp8 products",
    "muon": "all parameters, Muon",
    "lora": "LoRA, rank 16",
    "pytorch-lora": "the same in plain PyTorch with PEFT",
    "qlora": "LoRA, rank 16, on an nf4 base",
    "dpo": "DPO against the model's own wrong replies",
    "grpo": "GRPO, rewarded by the verifier",
}
CURVES = ("full", "pytorch", "trl", "lora", "pytorch-lora")


def results() -> dict[str, list[dict[str, Any]]]:
    """The results of each machine, in the order of `NAMES`."""
    machines = defaultdict(list)
    for file in sorted(RESULTS.glob("scores-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        machine = result["environment"]
        where = machine["gpu"]["name"] if machine["gpu"] else f"{machine['usable_cores']} CPU cores"
        machines[where].append(result)
    order = list(NAMES)
    return {
        where: sorted(of_machine, key=lambda result: order.index(result["variant"]))
        for where, of_machine in machines.items()
    }


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of so many trials (Wilson 1927)."""
    z2 = 1.96**2 / count
    middle, width = share + z2 / 2, sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    return (middle - width) / (1 + z2), (middle + width) / (1 + z2)


def accuracy(scores: dict[str, Any]) -> float:
    """The share of right replies over all tasks."""
    return sum(scores["right"].values()) / sum(scores["of"].values())


def _row(result: dict[str, Any]) -> str:
    seeds = result["seeds"]
    shares = [accuracy(seed) for seed in seeds]
    count, tasks = sum(seeds[0]["of"].values()), sorted(seeds[0]["of"])
    low, high = wilson(fmean(shares), count)
    of_task = [fmean(s["right"][task] / s["of"][task] for s in seeds) for task in tasks]
    trained = result["variant"] != "before"
    cells = [
        NAMES[result["variant"]],
        f"**{fmean(shares):.1%}** ({low:.1%} to {high:.1%})",
        ", ".join(f"{share:.1%}" for share in shares) if trained else "",
        *(f"{share:.0%}" for share in of_task),
        f"{fmean(seed['loss'] for seed in seeds):.4f}",
    ]
    return "| " + " | ".join(cells) + " |"


def lines() -> list[str]:
    """A table for each machine."""
    text: list[str] = []
    for where, of_machine in results().items():
        tasks, case = sorted(of_machine[0]["seeds"][0]["of"]), of_machine[0]["case"]
        count = sum(of_machine[0]["seeds"][0]["of"].values())
        steps = f"{case['rows']} rows, {case['steps']} steps"
        columns = ["variant", "right (95 %)", "seeds", *tasks, "loss"]
        text += [
            f"**{where}**: {steps} of {case['batch_size']}; {count} questions held out.",
            "",
            "| " + " | ".join(columns) + " |",
            "|---" * len(columns) + "|",
            *map(_row, of_machine),
            "",
        ]
    return text[:-1]


def pictures() -> list[str]:
    """A line for each result of `benchmarks.pictures`."""
    text = ["| machine | taught | read before | read after | time |", "|---" * 5 + "|"]
    for file in sorted(RESULTS.glob("pictures-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        after = result["after"]
        low, high = wilson(after, result["seen"])
        cells = [
            f"{result['environment']['usable_cores']} CPU cores",
            f"{result['rows']:,} pictures, {result['steps']} steps of 64",
            f"{result['before']:.1%}",
            f"**{after:.1%}** ({low:.1%} to {high:.1%})",
            f"{result['seconds'] / 60:.0f} min",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return text


def draw(path: Path) -> None:
    """The training losses of the first machine with several seeds: means, and the seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(results().values(), key=lambda runs: sum(len(run["seeds"]) for run in runs))
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for result in most:
        curves = [seed["losses"] for seed in result["seeds"] if "losses" in seed]
        if result["variant"] in CURVES and curves:
            mean = [fmean(at) for at in zip(*curves, strict=True)]
            steps = range(1, len(mean) + 1)
            axes.plot(steps, mean, label=NAMES[result["variant"]], linewidth=1)
            low, high = (list(map(edge, zip(*curves, strict=True))) for edge in (min, max))
            axes.fill_between(steps, low, high, alpha=0.15)
    axes.set(xlabel="step", ylabel="training loss, mean and range of the seeds", yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    from benchmarks.tables import main

    main()
    draw(ROOT / "docs" / "results.png")
