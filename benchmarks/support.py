"""docs/support.md: features against each other, by one step of a tiny model on the CPU.

    python -m benchmarks.support

A pair that trains is `yes`; one that is refused is `no`, with the reason. Whatever else happens, or
needs a package that is not here, is `untested`.
"""

import json
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from megatrain import Placement
from megatrain.config.load import validate
from megatrain.errors import MegatrainError
from megatrain.integrations import StreamedTrainer
from megatrain.parallel.distributed import ProcessGroups
from megatrain.train.loop import train
from tests.cli.cases import leave_out
from tests.cli.test_images import llava, picture, write_model
from tests.parity.cases import llama
from tests.parity.ranks import run_ranks
from tests.unit.data_cases import chat_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
LORA = {"method": "lora", "r": 2, "target_modules": "all-linear"}
RANKS = {"devices": 2}
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "LoRA": {"adapter": LORA},
    "base: nf4": {"adapter": LORA, "model": {"base": "nf4"}},
    "base: fp8": {"adapter": LORA, "model": {"base": "fp8"}},
    "precision: fp8": {"engine": {"precision": "fp8"}},
    "states: int8": {"optimizer": {"states": "int8"}},
    "master: 24": {"optimizer": {"master": 24}},
    "Muon": {"optimizer": {"name": "muon"}},
    "no clipping": {"training": {"max_grad_norm": None}},
    "disk": {"engine": {"placement": {"slots": 2, "disk_moments": 2}}},
    "packing": {"data": {"packing": True}},
    "images": {"model": {"path": "IMAGES"}},
    "2 GPUs": {"engine": RANKS},
    "shared rows": {"engine": RANKS | {"sequence_parallel": 2}},
    "DPO": {"loss": {"name": "dpo"}},
    "reward": {"loss": {"name": "reward"}},
    "contrastive": {"loss": {"name": "contrastive"}},
    "distillation": {"loss": {"name": "distill", "top_k": 4}},
    "GRPO": {"loss": {"name": "grpo", "num_generations": 2, "max_completion_length": 4}},
}
TRAINERS = {
    "Trainer": (Trainer, TrainingArguments),
    "SFTTrainer": (trl.SFTTrainer, trl.SFTConfig),
    "DPOTrainer": (trl.DPOTrainer, trl.DPOConfig),
    "RewardTrainer": (trl.RewardTrainer, trl.RewardConfig),
}
BY_TRAINERS = ("", "LoRA", "base: nf4", "base: fp8", "disk", "packing", "precision: fp8")
MISSING = re.compile(r"is not installed|pip install|No module named")
Cell = tuple[str, str]  # yes, no or untested, and why


def rows(loss: str, images: str | None) -> list[dict[str, Any]]:
    """Rows of data for a loss; `images`: the file of an image that belongs to each question."""
    asked = [f"What is {n} + {n}?" for n in range(8)]
    if images is not None:
        asked = [f"<image>\n{text}" for text in asked]
    prompts = [[{"role": "user", "content": text}] for text in asked]
    reply = [{"role": "assistant", "content": "It is 42."}]
    other = [{"role": "assistant", "content": "no idea"}]
    kept: list[dict[str, Any]]
    if loss in ("dpo", "reward"):
        kept = [{"prompt": prompt, "chosen": reply, "rejected": other} for prompt in prompts]
    elif loss == "contrastive":
        kept = [{"anchor": text, "positive": f"{text} It is 42."} for text in asked]
    elif loss == "grpo":
        kept = [{"prompt": prompt} for prompt in prompts]
    else:
        kept = [{"messages": prompt + reply} for prompt in prompts]
    return [row if images is None else row | {"images": [images]} for row in kept]


class Trials:
    """Tiny models and data in a folder, and single steps on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        torch.manual_seed(0)
        tokenizer = chat_tokenizer("qwen")
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
        sizes["pad_token_id"] = tokenizer.pad_token_id
        llama(**sizes).save_pretrained(folder / "text")
        tokenizer.save_pretrained(folder / "text")
        write_model(folder / "images", llava)
        reward = (
            "def length(completions, **_):\n    return [float(len(each)) for each in completions]\n"
        )
        (folder / "rewards.py").write_text(reward)
        self.image = str(folder / picture(folder, "pictures/0.png", 0))

    def run_file(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The run file of features together. Raises ValueError: they are choices of one key."""
        self.count += 1
        place = self.folder / f"run-{self.count}"
        tree: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.folder / "text")},
            "data": {"sequence_length": 96, "cache_dir": str(place / "cache"), "packing": False},
            "training": {"steps": 1, "batch_size": 4, "micro_batch_size": 2},
            "optimizer": {"lr": 1e-3},
            "engine": {"device": "cpu"},
            "output": {"folder": str(place / "run")},
        }
        chosen: dict[tuple[str, str], Any] = {}
        for section, values in [part for name in names for part in FEATURES[name].items()]:
            for key, value in values.items():
                if chosen.setdefault((section, key), value) != value:
                    raise ValueError(f"{section}.{key} is one or the other")
                tree.setdefault(section, {})[key] = value
        loss, images = tree.get("loss", {}).get("name", ""), "images" in names
        if images:
            tree["model"]["path"] = str(self.folder / "images")
        if loss == "distill":
            tree["loss"]["teacher"] = tree["model"]["path"]
        if loss == "grpo":
            tree["rollout"] = {"rewards": [f"{self.folder / 'rewards.py'}:length"]}
        if "disk" in names:
            tree["engine"]["disk"] = str(place)
        place.mkdir()
        data = place / "rows.jsonl"
        lines = map(json.dumps, rows(loss, self.image if images else None))
        data.write_text("\n".join(lines))
        tree["data"]["path"] = str(data)
        return tree

    def together(self, *sets: tuple[str, ...]) -> list[Cell]:
        """Of each set whether its features train together, and why not."""
        trees: dict[tuple[str, ...], dict[str, Any]] = {}
        found: dict[tuple[str, ...], Cell] = {}
        for names in sets:
            try:
                trees[names] = self.run_file(names)
            except ValueError as error:
                found[names] = "no", str(error)
        on_ranks = {names: tree for names, tree in trees.items() if "devices" in tree["engine"]}
        for names in trees.keys() - on_ranks.keys():
            found[names] = attempt(trained, trees[names])
        found |= zip(on_ranks, self._on_ranks([*on_ranks.values()]), strict=True)
        return [found[names] for names in sets]

    def _on_ranks(self, trees: list[dict[str, Any]]) -> list[Cell]:
        """What comes of run files on two ranks, which are started once for all."""

        def work(group: Any) -> list[Cell]:
            @contextmanager
            def joined():
                yield ProcessGroups(dist.get_rank(), dist.get_world_size(), host=group)

            with mock.patch("megatrain.train.loop.joined", joined):
                return [attempt(trained, tree) for tree in trees]

        if not trees:
            return []
        try:
            return run_ranks(2, Path(trees[0]["data"]["cache_dir"]).parent, work)[0]
        except AssertionError as error:
            return [("untested", str(error).splitlines()[-1])] * len(trees)

    def by_trainer(self, trainer: str, feature: str) -> Cell:
        """Whether a feature trains under a Trainer, and why not."""
        return attempt(self._by_trainer, trainer, feature)

    def _by_trainer(self, trainer: str, feature: str) -> None:
        kind, arguments = TRAINERS[trainer]
        self.count += 1
        place, wanted = self.folder / f"run-{self.count}", FEATURES.get(feature, {})
        options = wanted.get("engine", {}) | wanted.get("model", {})
        options = {name: value for name, value in options.items() if name != "path"}
        if feature == "disk":
            options["disk"] = str(self.folder)
            options["placement"] = Placement(**options["placement"])

        streamed = type("Streamed", (StreamedTrainer, kind), {"engine_options": options})
        more: dict[str, Any] = {} if trainer == "Trainer" else {"max_length": 96}
        if feature == "packing":
            if not hasattr(arguments, "packing"):
                raise ValueError(f"{arguments.__name__} has no packing")
            more["packing"] = True
        settings = arguments(
            output_dir=str(place), max_steps=1, per_device_train_batch_size=2, bf16=True,
            use_cpu=True, report_to=[], gradient_checkpointing=False, disable_tqdm=True, **more,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "text")
        loss = {"DPOTrainer": "dpo", "RewardTrainer": "reward"}.get(trainer, "")
        data = Dataset.from_list(rows(loss, None))
        model: Any = str(self.folder / "text")
        if trainer == "Trainer":
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            ids = tokenizer([r["messages"][-1]["content"] for r in data], padding=True)["input_ids"]
            data = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
        lora = LoraConfig(r=2, target_modules="all-linear") if "adapter" in wanted else None
        more = {} if trainer == "Trainer" else {"processing_class": tokenizer, "peft_config": lora}
        if lora is not None and trainer == "Trainer":
            model = get_peft_model(model, lora)
        streamed(model, args=settings, train_dataset=data, **more).train()


def trained(tree: dict[str, Any]) -> None:
    """One step of a run file."""
    train(validate(tree, "run.yaml"), "run")


def attempt(work: Any, *arguments: Any) -> Cell:
    """What came of some work."""
    try:
        work(*arguments)
    except Exception as error:  # of any library
        text = re.sub(r"/\S*/(?=[\w.-]+)", "", str(error).strip().splitlines()[0])
        text = re.sub(r"^(run\.yaml|rows\.jsonl:\d+): ", "", text)
        text = re.split(r"; it has|: set it to|: leave it out", text)[0]
        refused = isinstance(error, MegatrainError | TypeError | ValueError)
        return ("no" if refused and not MISSING.search(str(error)) else "untested"), text
    return "yes", ""


def pairs() -> list[tuple[str, ...]]:
    """Every feature alone, and every two."""
    return [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]


def page(together: dict[tuple[str, ...], Cell], by_trainers: dict[tuple[str, str], Cell]) -> str:
    """The page of what came of all trials."""
    whys: list[str] = []

    def shown(cell: Cell) -> str:
        if cell[0] == "yes":
            return "yes"
        if cell[1] not in whys:
            whys.append(cell[1])
        return f"{cell[0]} {whys.index(cell[1]) + 1}"

    names = [*FEATURES]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for at, name in enumerate(names):
        cells = [shown(together[names[i], name]) for i in range(at)]
        cells += [shown(together[(name,)]), *[""] * (len(names) - at - 1)]
        lines.append(f"| **{name}** | {' | '.join(cells)} |")
    table = "\n".join(lines)
    lines = [f"| | {' | '.join(TRAINERS)} |", f"|---|{'---|' * len(TRAINERS)}"]
    for name in BY_TRAINERS:
        cells = [shown(by_trainers[kind, name]) for kind in TRAINERS]
        lines.append(f"| {name or 'all parameters'} | {' | '.join(cells)} |")
    trainers = "\n".join(lines)
    listed = "\n".join(f"{number}. {why}" for number, why in enumerate(whys, 1))
    return HEAD.format(table=table, trainers=trainers, whys=listed)


HEAD = """# What works with what

`python -m benchmarks.support` writes this page: it takes one step of a tiny model on the CPU with
every two features. **yes**: the step was taken. **no**: refused, with the reason below.
**untested**: it failed in another way, or needs what was not there. A step on a CPU proves that two
features go together; what each computes is compared with plain PyTorch by the tests
([models.md](models.md) lists the families).

## In a run file

The diagonal is the feature alone. `disk` keeps states on a disk; in `shared rows` two GPUs share
every row (`engine.sequence_parallel`).

{table}

## Under the Trainers of transformers and TRL

With `StreamedTrainer` ([training.md](training.md)); the optimizer is AdamW by the Trainer's own
arguments, and a process trains on one GPU.

{trainers}

## Reasons

{whys}
"""


def main() -> None:
    """Try everything and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        leave_out(setattr)
        trials = Trials(Path(folder))
        together = dict(zip(pairs(), trials.together(*pairs()), strict=True))
        by_trainers = {}
        for each in [(kind, name) for name in BY_TRAINERS for kind in TRAINERS]:
            by_trainers[each] = trials.by_trainer(*each)
            print(each, *by_trainers[each], file=sys.stderr, flush=True)
    PAGE.write_text(page(together, by_trainers), encoding="utf-8")


if __name__ == "__main__":
    main()
