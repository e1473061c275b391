"""Times whole steps of models by their published shapes, with pictures where they take them.

    python -m benchmarks.models --name qwen2.5-vl-7b --sequences 48 --sequence-length 2048 \
        --images 1 --out model.json
    python -m benchmarks.models --name qwen2.5-vl-7b ... --resident 2

`--resident ROWS` runs transformers' model on the GPU instead, with so many rows at once: layers
compiled, nothing recomputed, forward and backward alone, no optimizer; `--attention
flex_attention` chooses its form of attention. Weights and tokens are
random; in each row the images stand before the text. `--every 2` gives every other micro-batch
no pictures; `--frozen` is a pattern of the names of parameters that are not trained. `--experts`
adapts the stacked weights of experts, too, where PEFT's "all-linear" leaves them out (gpt-oss).
`--base folder` keeps frozen weights in the format that the model is published in:

    python -m benchmarks.models --name gpt-oss-120b --sequences 24 --sequence-length 4096 \
        --lora-r 16 --experts --base folder --host-memory 125GiB --out model.json

Under `torchrun --nproc-per-node N` each of N GPUs takes `--sequences` rows, and rank 0 writes.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.configurations import CONFIGS, configuration
from benchmarks.options import case_of, num_compilations, parse, peak_process_bytes, write
from benchmarks.rivals.common import next_token_loss
from benchmarks.step import SHOWN_LINES, join_ranks
from megatrain import AdamW, Engine, Placement
from megatrain.base.json_yaml import parse_yaml
from megatrain.cli.models import lora_adapter
from megatrain.compat.transformers import set_attention
from megatrain.model.trained import Trained
from megatrain.source.source import Alike
from megatrain.telemetry.host import commit, environment
from megatrain.telemetry.metrics import model_tflops
from megatrain.telemetry.timeline import StepRecorder, breakdown

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Picture:
    """An image as a model's processor hands it on.

    Attributes:
        tokens: placeholders that stand for the image.
        pixels: shape of `pixel_values` of one image; patches lie along its first dimension.
        grid: `image_grid_thw`; None: the model has none, and images are stacked.
        types: the name of the input that says which tokens are placeholders.
    """

    tokens: int
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None
    types: str


PICTURES = {  # of 1,024 x 1,024, as their processors resize it
    "qwen2.5-vl-7b": Picture(37 * 37, (74 * 74, 3 * 2 * 14 * 14), (1, 74, 74), "mm_token_type_ids"),
    "gemma-3-12b": Picture(256, (3, 896, 896), None, "token_type_ids"),
    "qwen3-vl-30b-a3b": Picture(1024, (64 * 64, 3 * 2 * 16 * 16), (1, 64, 64), "mm_token_type_ids"),
}


def random_step(chosen: argparse.Namespace, config: Any, rows: int, seed: int) -> Iterator[Batch]:
    """Micro-batches of `rows` rows: ids and labels [rows, tokens], and the pictures before them."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(150_000, config.get_text_config().vocab_size - 1)
    for index, start in enumerate(range(0, chosen.sequences, rows)):
        shape = (min(rows, chosen.sequences - start), chosen.sequence_length)
        ids_BT = torch.randint(vocabulary, shape, generator=generator)
        batch = {"input_ids": ids_BT, "labels": ids_BT.clone()}
        if chosen.images and index % chosen.every == 0:
            picture = PICTURES[chosen.name]
            batch |= _with_pictures(picture, config, batch, chosen.images, generator)
        yield batch


def _with_pictures(
    picture: Picture, config: Any, batch: Batch, images: int, generator: torch.Generator
) -> Batch:
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    token = getattr(config, "image_token_id", None) or config.image_token_index
    for image in range(images):
        first = 1 + image * (picture.tokens + 2)
        ids_BT[:, first : first + picture.tokens] = token
    stands_BT = ids_BT == token
    labels_BT[stands_BT] = -100
    count = ids_BT.shape[0] * images
    pixels = torch.randn(count, *picture.pixels, generator=generator)
    result = {picture.types: stands_BT.long()}
    if picture.grid is not None:
        return result | {
            "pixel_values": pixels.flatten(0, 1),
            "image_grid_thw": torch.tensor(picture.grid).expand(count, 3).contiguous(),
        }
    return result | {"pixel_values": pixels}


def _adapter(chosen: Any) -> dict[str, Any] | None:
    adapter = lora_adapter(chosen.lora_r)
    if adapter is not None and chosen.experts:
        adapter["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return adapter


def streamed(chosen: Any) -> dict[str, Any]:
    """The engine's steps."""
    config = configuration(chosen.name, chosen.layers)
    if chosen.base == "folder":
        config.quantization_config = {"quant_method": "mxfp4"}  # as gpt-oss is published
    begun = time.perf_counter()
    row = None
    if chosen.images:
        one = argparse.Namespace(**{**vars(chosen), "sequences": 1})
        row = {n: v for n, v in next(random_step(one, config, 1, 0)).items() if n != "labels"}
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(), dist.get_rank())
    engine = Engine(
        Alike(config),
        optimizer=AdamW(lr=1e-5, states=chosen.states),
        tokens_per_step=ranks * chosen.sequences * chosen.sequence_length,
        sequence_length=chosen.sequence_length,
        micro_batch=chosen.micro_batch or None,
        precision=chosen.precision,
        adapter=_adapter(chosen),
        base=chosen.base,
        trained=Trained(freeze=[chosen.frozen] if chosen.frozen else []),
        media=row,
        placement="auto" if chosen.placement is None else Placement(**parse_yaml(chosen.placement)),
        device=chosen.device,
        device_memory=chosen.device_memory,
        host_memory=chosen.host_memory,
        group=group,
    )
    with engine:
        built = time.perf_counter() - begun
        rows = chosen.micro_batch or engine.micro_batch or 1

        def step(micro_batches: list[Batch]) -> float:
            return engine.step(micro_batches).loss

        result = timed(chosen, config, rows, step, engine.computing, ranks=ranks, seed=1000 * rank)
        micro_batches = [*random_step(chosen, config, rows, 0)]
        recorder = StepRecorder(engine.recording)
        recorder.start()  # a step's updates run during the next step's forward
        engine.step(micro_batches)
        recorder.start()
        engine.step(micro_batches)
        work = breakdown(recorder.end(), "compute").as_dict()
        print(*work["lines"][:SHOWN_LINES], sep="\n")
        return {
            **result,
            "breakdown": work,
            "build_seconds": built,
            "placement": engine.placement.as_dict(),
            "parameters": engine.num_parameters,
            "trained_parameters": engine.num_trained,
            "memory": engine.memory(),
            "host_peak_bytes": peak_process_bytes(),
        }


def resident(chosen: Any) -> dict[str, Any]:
    """Forward and backward of transformers' model that rests on the device, in bf16."""
    config = configuration(chosen.name, chosen.layers)
    device = torch.device("cuda" if chosen.device is None else chosen.device)
    pictures = bool(chosen.images)
    config = config if pictures else config.get_text_config()
    if chosen.attention:
        set_attention(config, chosen.attention)
    kind = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    with device:
        model = kind.from_config(config, dtype=torch.bfloat16).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not chosen.frozen or not re.search(chosen.frozen, name))
    text = model.model.language_model if pictures else model.model
    for layer in text.layers:
        layer.compile(dynamic=False)
    model.loss_function = next_token_loss

    def step(micro_batches: list[Batch]) -> float:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for batch in micro_batches:
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            if "pixel_values" in on_device:
                on_device["pixel_values"] = on_device["pixel_values"].bfloat16()
            loss = model(**on_device).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return float(total)

    sizes = (sum(p.numel() for p in model.parameters()),) * 2
    result = timed(chosen, config, chosen.resident, step, sizes)
    return result | {"device_peak_bytes": torch.cuda.max_memory_allocated(device)}


def timed(
    chosen: Any,
    config: Any,
    rows: int,
    step: Callable[[list[Batch]], float],
    sizes: tuple[int, int],
    ranks: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Seconds and losses of the warm-up and the measured steps of `rows` rows at once.

    Args:
        sizes: parameters that a token is multiplied with, and those of them that are trained.
        ranks: how many take as many rows; tokens are those of all, and TFLOPS of one.
        seed: of the first step's rows.
    """
    seconds, losses = [], []
    for index in range(chosen.warmup + chosen.steps):
        micro_batches = [*random_step(chosen, config, rows, seed + index)]
        begun = time.perf_counter()
        losses.append(float(step(micro_batches)))
        seconds.append(time.perf_counter() - begun)
    measured = seconds[chosen.warmup :]
    median, tokens = statistics.median(measured), chosen.sequences * chosen.sequence_length
    all_tokens = ranks * tokens
    return {
        "rows_at_once": rows,
        "step_seconds": seconds,
        "losses": losses,
        "median_seconds": median,
        "spread_seconds": max(measured) - min(measured),
        "ranks": ranks,
        "tokens_per_second": all_tokens / median,
        "model_tflops": model_tflops(*sizes, tokens, median),
        "compilations": num_compilations(),
    }


def main() -> None:
    """Measure one side of one case, print a line, write the result."""
    chosen = parse(
        __doc__,
        name=[*CONFIGS],
        sequences=48,
        sequence_length=2048,
        images=0,
        every=1,
        frozen=str,
        layers=int,
        states=["int8", "fp32", "bf16"],
        precision=["bf16", "fp32", "fp8"],
        base=["bf16", "fp8", "nf4", "folder"],
        micro_batch=0,
        lora_r=0,
        experts=False,
        resident=0,
        attention=str,
        placement=str,
        device=str,
        device_memory=str,
        host_memory=str,
        warmup=2,
        steps=3,
        out=Path,
    )
    mine = join_ranks() if dist.is_torchelastic_launched() else 0
    result = resident(chosen) if chosen.resident else streamed(chosen)
    if mine:
        return
    result |= {
        "benchmark": "models",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "case": case_of(chosen),
        "environment": environment(chosen.device or "cuda"),
    }
    who = "transformers, resident" if chosen.resident else "megatrain"
    print(
        f"{chosen.name}, {who}: {result['median_seconds']:.3f} s, "
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['model_tflops']:.0f} model TFLOPS",
        flush=True,
    )
    write(chosen.out, result)


if __name__ == "__main__":
    main()
