"""Ranks on GPUs against one: the same result, and how much faster.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --output ranks.json

Each rank takes `--sequences` rows a step; one GPU by itself is measured before with as many, in the
same placement. With one rank its collectives run all the same (NCCL with itself), which shows what
they cost, and that nothing waits for ever.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config
from transformers.models.qwen2 import Qwen2ForCausalLM

from benchmarks.options import peak_process_bytes
from benchmarks.step import StepCase, build_engine, join_ranks, random_step, statistics_of
from megatrain import AdamW, Engine, Placement, api
from megatrain.parallel.distributed import ALONE, Ranks, connected
from megatrain.telemetry.host import environment

TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ROWS = ((2, 60), (3, 33), (1, 128), (4, 17), (2, 90), (1, 7), (2, 64), (3, 50))
PLACEMENTS = {
    "streamed": Placement(slots=3),
    "small": Placement(slots=1, layer_inputs="host", keep_rows=False),
    "graphs": Placement(slots=3, save_activations=2),
    "resident": Placement(slots=3, resident=("embedding", "layer 1", "head"), passes=2),
    "owned experts": Placement(slots=2, own_experts=True),
}


def main() -> None:
    """Check, measure, and write the result as rank 0."""
    given = _arguments()
    join_ranks()
    group = dist.group.WORLD
    if dist.get_world_size() == 1:

        def opened(group: Any, device: torch.device) -> Ranks:  # one rank has none otherwise
            return ALONE if group is None else connected(group, device)

        vars(api)["open_ranks"] = opened
    result: dict[str, Any] = {"ranks": dist.get_world_size()}
    result["parity"] = {name: parity(group, each) for name, each in PLACEMENTS.items()}
    result["parity"]["shared rows"] = parity(group, Placement(slots=3, compile=True), shared=True)
    if dist.get_rank() == 0:
        print(json.dumps(result["parity"], indent=1), flush=True)
    case = StepCase(
        given.shape, given.layers, given.sequences, 1024, given.micro_batch, 1.0, "bf16", "auto",
        json.loads(given.placement), 2, given.steps, 0, states=given.states,
    )  # fmt: skip
    if not given.together_only:
        if dist.get_rank() == 0:
            result["alone"] = measured(case, lambda: build_engine(case))
        dist.barrier()  # its memory is given back
    mine = replace(case, seed=1000 * dist.get_rank())
    found: list[Any] = [None] * dist.get_world_size()
    all_rows = replace(case, sequences=case.sequences * dist.get_world_size())
    together = measured(mine, lambda: build_engine(all_rows, group=group))
    dist.all_gather_object(found, together)
    if dist.get_rank() == 0:
        result["together"], result["environment"] = found, environment("cuda")
        if "alone" in result:
            pair = (found[0], result["alone"])
            result["times one"] = pair[0]["tokens_per_second"] / pair[1]["tokens_per_second"]
        if given.output is not None:
            given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        keys = ("tokens_per_second", "median_seconds", "model_tflops", "loss")
        for name, each in (("alone", result.get("alone")), ("together", found[0])):
            print(name, {key: each[key] for key in keys} if each else "not measured")
        print("times one", result.get("times one"))
    dist.destroy_process_group()


def parity(group: Any, placement: Placement, shared: bool = False) -> dict[str, float]:
    """The largest difference between ranks and one GPU that has all micro-batches, in fp32.

    Of a dense model, or of a mixture of experts if ranks own experts. `shared`: ranks share rows.
    """
    generator = torch.Generator().manual_seed(0)
    ids = [[torch.randint(512, each, generator=generator) for each in ROWS] for _ in range(3)]
    steps = [[{"input_ids": each, "labels": each} for each in step] for step in ids]
    rank, size = dist.get_rank(), dist.get_world_size()
    edges = [len(ROWS) * each // size for each in range(size + 1)]

    def train(group: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        how: dict[str, Any] = {"optimizer": AdamW(lr=1e-3), "precision": "fp32", "group": group}
        if group and shared:
            how["sequence_parallel"] = size
        part = slice(*edges[rank : rank + 2]) if group and not shared else slice(None)
        if placement.own_experts:
            model: Any = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=8))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**TINY))
        with Engine(model, placement=placement, **how) as engine:
            said = [engine.step(step[part]) for step in steps]
            return said, dict(engine.named_masters())

    one, masters = train(None)
    all_of_them, of_ranks = train(group)
    pairs = zip(one, all_of_them, strict=True)
    differences = [(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm)) for a, b in pairs]
    loss, norm = map(max, zip(*differences, strict=True))
    weights = (float((value - of_ranks[name]).abs().max()) for name, value in masters.items())
    return {"loss": loss, "norm": norm, "weights": max(weights)}


def measured(case: StepCase, make: Callable[[], Engine]) -> dict[str, Any]:
    """Seconds of steps of an engine, all ranks' tokens in them, and its memory."""
    with make() as engine:
        seconds, sizes = [], engine.computing
        for index in range(case.warmup + case.steps):
            micro_batches = random_step(case, engine.config.vocab_size, case.seed + index)
            started = time.perf_counter()
            done = engine.step(micro_batches)
            seconds.append(time.perf_counter() - started)
        return {
            "placement": engine.placement.as_dict(),
            "step_seconds": seconds,
            "loss": done.loss,
            **statistics_of(seconds[case.warmup :], done.tokens, *sizes),
            "memory": engine.memory(),
            "host_peak_bytes": peak_process_bytes(),
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequences", type=int, default=96, help="rows of a rank's step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--placement", default='{"slots": 3, "head_tokens": 8192, "compile": true}')
    parser.add_argument("--together-only", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
