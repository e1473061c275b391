"""The planner page: docs/planner.html answers without an installation what fits a machine.

    python -m benchmarks.planner_page plan [--models 7b 14b] [--gpus "RTX 3090"] [--tokens 65536]
    python -m benchmarks.planner_page page

`plan` makes the plans that benchmarks/results/planner.json lacks and keeps them after each model
and method; it can be stopped and started. `page` writes the page from what is kept. Of a GPU whose
listed figures have changed since, the plans are made again, and left out of the page until then.

A plan is what `megatrain plan` says without its remedies: rows of 1,024 tokens, AdamW, exact
clipping, the usual cores of such a machine. Hosts are planned from the largest on. A plan that
leaves a tenth of a smaller host free is that host's too, and where a model does not fit, no smaller
host is planned.
"""

import argparse
import gc
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.configurations import CONFIGS, PUBLISHED, configuration
from benchmarks.predictions import RESULTS
from megatrain.base.units import GIB
from megatrain.cli.models import NamedModel, lora_adapter, named_config
from megatrain.errors import MegatrainError
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.workload import SEQUENCE_LENGTH, Workload
from megatrain.machine import Machine, machine_for
from megatrain.model.attention import attend_by_kernel
from megatrain.model.spec import ModelSpec
from megatrain.optim import AdamW
from megatrain.plan.planner import Planner
from megatrain.source.source import Base
from megatrain.telemetry.gpu import named_gpu
from megatrain.telemetry.host import commit

KEPT = RESULTS / "planner.json"
TEMPLATE = Path(__file__).with_suffix(".html")
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "planner.html"

HOST_GIB = (2048, 1024, 512, 256, 128, 64, 32)
TOKENS = (65_536, 16_384)
CORES = {"desktop": 16, "workstation": 32, "server": 32}
FREE = 0.1  # of a smaller host's memory; a search that has so much more to spend ends alike
FIELDS = ("fits", "seconds", "binds", "device_gib", "host_gib", "rows", "made")
"""Of a plan. Where it does not fit, the memory is what would do; `made`: index of `made`."""


@dataclass(frozen=True)
class Method:
    """A way to train: the moments of AdamW, and LoRA's rank and base (0: all parameters)."""

    name: str
    brief: str
    states: Literal["fp32", "int8"] = "fp32"
    lora_r: int = 0
    base: Base = "bf16"

    def options(self) -> list[str]:
        """Those of `megatrain plan`."""
        options = [] if self.states == "fp32" else [f"--states {self.states}"]
        options += [f"--lora-r {self.lora_r}"] if self.lora_r else []
        return options + ([] if self.base == "bf16" else [f"--base {self.base}"])

    def run(self) -> str:
        """A run file, with HUB, ROWS and HOST for the model, the rows of a step, the memory."""
        base = "" if self.base == "bf16" else f"  base: {self.base}\n"
        adapter = f"adapter:\n  method: lora\n  r: {self.lora_r}\n  target_modules: all-linear\n"
        states = "" if self.states == "fp32" else f"  states: {self.states}\n"
        return (
            f"model:\n  path: HUB\n{base}{adapter if self.lora_r else ''}"
            f"data:\n  path: chats.jsonl\n  sequence_length: {SEQUENCE_LENGTH}\n  packing: true\n"
            f"training:\n  epochs: 1\n  batch_size: ROWS\n"
            f"optimizer:\n  lr: {'2.0e-4' if self.lora_r else '1.0e-5'}\n{states}"
            f"engine:\n  host_memory: HOSTGiB\n"
        )


@dataclass(frozen=True)
class Offered:
    """A model on the page: `hub` names its weights; None: it has none."""

    name: str
    hub: str | None


METHODS = {
    "fp32": Method("all parameters, fp32 states", "all, fp32"),
    "int8": Method("all parameters, 8-bit states", "all, 8-bit", states="int8"),
    "lora": Method("LoRA of rank 16, bf16 base", "LoRA", lora_r=16),
    "nf4": Method("LoRA of rank 16, 4-bit base (nf4)", "LoRA, nf4", lora_r=16, base="nf4"),
}
MODELS = {
    "0.5b": Offered("Qwen2.5 0.5B", "Qwen/Qwen2.5-0.5B"),
    "1.5b": Offered("Qwen2.5 1.5B", "Qwen/Qwen2.5-1.5B"),
    "3b": Offered("Qwen2.5 3B", "Qwen/Qwen2.5-3B"),
    "7b": Offered("Qwen2.5 7B", "Qwen/Qwen2.5-7B"),
    "14b": Offered("Qwen2.5 14B", "Qwen/Qwen2.5-14B"),
    "32b": Offered("Qwen2.5 32B", "Qwen/Qwen2.5-32B"),
    "72b": Offered("Qwen2.5 72B", "Qwen/Qwen2.5-72B"),
    "120b": Offered("120B (our own shape)", None),
} | {
    name: Offered(model.name, model.hub)
    for name, model in PUBLISHED.items()
    if not name.startswith("qwen2.5")  # the shapes above; one with images is planned by its own run
}
GPUS = (
    *("RTX 3090", "RTX 4090", "RTX 5090", "A100 80GB", "H100 SXM", "H200", "B200"),
    *("RTX PRO 6000", "L40S", "A100 40GB", "RTX 5080", "RTX 4080 SUPER", "RTX 3060", "GH200"),
    *("RTX A6000", "RTX 6000 Ada", "RTX 4060 Ti", "RTX 5060 Ti", "RTX 3080", "A10G", "L4"),
)
"""The order in which they are planned: the most asked for first."""


def structure(model: str, lora_r: int, base: Base) -> ModelSpec:
    """The structure of a model of the page, with its adapter."""
    if model in CONFIGS:
        config = configuration(model)
    else:
        config = named_config(model, max_positions=SEQUENCE_LENGTH)
    spec = NamedModel(model, config, adapter=lora_adapter(lora_r), frozen=base).spec()
    attend_by_kernel(spec, "bf16")
    return spec


def machine(gpu: str, host_gib: int) -> Machine:
    """The usual machine with a GPU and so much host memory, by listed figures."""
    return machine_for(gpu, host_gib * GIB, CORES[named_gpu(gpu).host])


def workload(method: Method, tokens: int) -> Workload:
    """A step of so many tokens."""
    return Workload(tokens, SEQUENCE_LENGTH, rule=AdamW(states=method.states))


def figures(gpu: str) -> dict[str, Any]:
    """The figures of a GPU that its plans rest on; others make them out of date."""
    rates = replace(machine(gpu, HOST_GIB[0]), link_gbps=None).as_dict()  # plans are of one GPU
    return {name: value for name, value in rates.items() if type(value) in (int, float)}


def planned(planner: Planner, where: Machine, step: Workload, made: int) -> list[Any]:
    """A plan as it is kept, in the order of `FIELDS`."""
    forecast = planner.fitting(where, step)
    if forecast is not None:
        memory = forecast.device_peak_bytes, forecast.host_peak_bytes
    else:
        least = planner.least(where, step)
        memory = least.machine.device_memory_bytes, least.machine.host_memory_bytes
    sizes = [round(num_bytes / GIB, 2) for num_bytes in memory]
    if forecast is None:
        return [False, None, None, *sizes, None, made]
    return [True, round(forecast.seconds, 4), forecast.binds, *sizes, forecast.micro_batch, made]


def kept(path: Path = KEPT) -> dict[str, Any]:
    """What is kept, less the plans of GPUs whose figures have changed."""
    empty: dict[str, Any] = {"fields": FIELDS, "made": [], "gpus": {}, "plans": {}}
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty
    stale = [gpu for gpu, then in data["gpus"].items() if then != figures(gpu)]
    for gpu in stale:
        del data["gpus"][gpu]
    data["plans"] = {
        name: column for name, column in data["plans"].items() if name.split("|")[2] not in stale
    }
    return data


def keep(data: dict[str, Any], path: Path = KEPT) -> None:
    """Write what is kept, a column a line."""
    plans = data["plans"]
    lines = [f"{json.dumps(name)}: {json.dumps(plans[name])}" for name in sorted(plans)]
    rest = json.dumps({name: value for name, value in data.items() if name != "plans"}, indent=1)
    text = f'{rest[:-2]},\n "plans": {{\n' + ",\n".join(lines) + "\n}}\n"
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def column(planner: Planner, gpu: str, step: Workload, made: int) -> dict[str, list[Any]]:
    """The plans of a GPU, a model, a method and a step, by host memory in GiB."""
    plans: dict[str, list[Any]] = {}
    for host_gib in HOST_GIB:
        last = next(reversed(plans.values()), None)
        if last is None or last[4] > (1 - FREE) * host_gib:
            plans[str(host_gib)] = last = planned(planner, machine(gpu, host_gib), step, made)
        if not last[0]:
            break
    return plans


def make_plans(models: Sequence[str], gpus: Sequence[str], tokens: Sequence[int]) -> None:
    """Make the plans that are missing, and keep them after each column."""
    data = kept()
    versions = {name: version(name) for name in ("torch", "transformers")}
    time = datetime.now(UTC).isoformat(timespec="minutes")
    data["made"].append({"commit": commit(), "time": time, **versions})
    torch.set_num_threads(1)
    gc.disable()  # as the command does
    for model in models:
        planners: dict[tuple[int, Base], Planner] = {}
        for (name, method), gpu, each in product(METHODS.items(), gpus, tokens):
            key, of = f"{model}|{name}|{gpu}|{each}", (method.lora_r, method.base)
            if key in data["plans"]:
                continue
            try:
                if of not in planners:
                    planners[of] = Planner(structure(model, *of))
                plans = column(planners[of], gpu, workload(method, each), len(data["made"]) - 1)
            except (MegatrainError, NotForeseeable) as error:
                print(f"{key}: {error}", file=sys.stderr, flush=True)
                continue
            data["plans"][key] = plans
            data["gpus"][gpu] = figures(gpu)
            keep(data)
            print(f"{sum(map(len, data['plans'].values()))} plans are kept: {key}", flush=True)
        planners.clear()
        gc.collect()


@dataclass(frozen=True)
class Record:
    """Steps measured on a GPU beside their forecasts, as docs/planning.md lists them."""

    seconds: list[float]
    device: list[float]
    host: list[float]

    @classmethod
    def of(cls, gpu: str) -> "Record":
        """Those of a GPU, by the first word of its name."""
        record = cls([], [], [])
        for line in (DOCS / "planning.md").read_text(encoding="utf-8").splitlines():
            errors = [float(error) for error in re.findall(r"\| ([+-][\d.]+)% ", line)]
            if len(errors) != 3:
                continue
            name = line.split("|")[1]
            other = re.search(r", ([A-Z]+\d+)(?=,| $)", name)
            if gpu.split()[0] == (other[1] if other else "H200"):
                for of, error in zip(vars(record).values(), errors, strict=True):
                    of.append(abs(error))
        return record

    def words(self) -> str:
        """How far forecasts were from measurements."""
        count = len(self.seconds)
        return (
            f"We measured {count} steps on this GPU. Of the forecasts of seconds half are within "
            f"{statistics.median(self.seconds):.1f} %, "
            f"{sum(error <= 10 for error in self.seconds)} of {count} within 10 %, and the worst "
            f"is {max(self.seconds):.0f} % off; of device memory {max(self.device):.0f} %, of host "
            f"memory {max(self.host):.0f} %. docs/planning.md lists all of them."
        )


_NOT_MEASURED = (
    "We have not measured this GPU. {others} The forecast rests on published figures and on shares "
    "of them that such GPUs are expected to reach. Those of H200 and H100 were mostly within 10 %; "
    "this one may be further off. megatrain doctor measures yours, megatrain plan then takes it."
)


def sure(gpu: str) -> str:
    """How sure a GPU's forecasts are: measured by us, by others, or by nobody."""
    record, others = Record.of(gpu), named_gpu(gpu).measured
    if record.seconds:
        return record.words()
    reported = f"Others report: {others}." if others else "Of nobody else is a measurement known."
    return _NOT_MEASURED.format(others=reported)


def on_page(data: dict[str, Any]) -> dict[str, Any]:
    """What the page's script looks up; columns by model, method, GPU and tokens, then by host."""
    columns = {key: plans for key, plans in data["plans"].items() if plans}
    planned = {part: {key.split("|")[part] for key in columns} for part in range(4)}
    gpus = []
    for name in GPUS:
        if name in planned[2]:
            where = machine(name, HOST_GIB[0])
            memory = round(where.device_memory_bytes / GIB, 2)
            figures = {"name": name, "memory": memory, "cores": where.cores}
            gpus.append(figures | {"sure": sure(name), "source": named_gpu(name).source})
    made = [
        data["made"][number]
        for number in sorted({p[-1] for c in columns.values() for p in c.values()})
    ]
    last = max(made, key=lambda each: each["time"])
    count = sum(map(len, columns.values()))
    return {
        "gpus": gpus,
        "hosts": sorted(HOST_GIB),
        "tokens": [tokens for tokens in TOKENS if str(tokens) in planned[3]],
        "models": [
            {"id": key, "name": model.name, "hub": model.hub,
             "asked": key.upper() if model.hub is None or key not in CONFIGS else model.hub}
            for key, model in MODELS.items() if key in planned[0]
        ],
        "methods": [
            {"id": key, "name": method.name, "brief": method.brief, "options": method.options(),
             "run": method.run()}
            for key, method in METHODS.items()
        ],
        "first": {"gpu": "RTX 4090", "host": 128, "model": "7b", "method": "fp32",
                  "tokens": TOKENS[0]},
        "made": f"{count} plans, the last of {last['time'][:10]} by commit {last['commit'][:8]}, "
                f"torch {last['torch']}, transformers {last['transformers']}.",
        "plans": {
            key: {host: [int(plan[0]), *plan[1:-1]] for host, plan in plans.items()}
            for key, plans in columns.items()
        },
    }  # fmt: skip


def page(data: dict[str, Any]) -> str:
    """The page of what is kept."""
    text = json.dumps(on_page(data), separators=(",", ":"), ensure_ascii=False)
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("@DATA@", text.replace("<", "\\u003c"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=["plan", "page"])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    options = parser.parse_args(arguments)
    if options.do == "plan":
        make_plans(options.models, options.gpus, options.tokens)
    else:
        PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
