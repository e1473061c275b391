"""Tokens a second of `megatrain generate` beside transformers' own.

Random weights of a shape, a batch of random prompts, greedy, no end token: resident through
transformers alone, resident, and streamed from host memory. Each is run
once before it is measured. Prints a line, and writes JSON to `--out`.

With `--streamed-alone`, for models that fit neither the GPU nor the disk: seconds of a pass over
the weights (one for the prompts, one for each further token) beside those that their bytes take to
cross the bus.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.options import case_of, parse, write
from megatrain import Engine, Placement
from megatrain.base.units import GIB
from megatrain.cli.models import qwen2_config
from megatrain.source.source import Alike
from megatrain.telemetry.host import environment

_OURS = ("resident", "streamed")


def measure(
    runs: Any, prompts: torch.Tensor, new: int, repeats: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """New tokens of all rows in a second, and the logits `[B, V]` after the prompts."""
    rates = []
    with runs as model:
        with torch.no_grad():
            logits = model(prompts, logits_to_keep=1).logits[:, -1].float()
        for _ in range(repeats + 1):
            start = time.perf_counter()
            made = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            made.cpu()  # waits for the device
            rates.append(len(prompts) * new / (time.perf_counter() - start))
    return {"tokens_per_second": median(rates[1:]), "each": rates[1:]}, logits


def streamed_alone(chosen: argparse.Namespace, prompts: torch.Tensor) -> dict[str, Any]:
    """Seconds of a pass over weights in host memory, and of their bytes alone through the bus."""
    engine = Engine(
        Alike(qwen2_config(chosen.shape, max(4096, chosen.prompt + chosen.new))),
        device=chosen.device,
        placement=Placement(slots=3),
    )
    rates, _ = measure(engine.whole_model(), prompts, chosen.new, chosen.repeats)
    table = engine.vocab_size * engine.config.hidden_size  # of which rows alone cross
    rates["memory"], rates["crossing_bytes"] = engine.memory(), (engine.num_parameters - table) * 2
    engine.close()
    rates["pass_seconds"] = len(prompts) / rates["tokens_per_second"]
    rates["bus_seconds"] = rates["crossing_bytes"] / bus_rate(torch.device(chosen.device))
    return rates


def bus_rate(device: torch.device) -> float:
    """Bytes a second of copies of 1 GiB from pinned host memory, one after the other."""
    host = torch.ones(GIB, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        there[-1].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return GIB / min(seconds)


def off(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of two models' logits, in standard deviations of one's."""
    return float((logits - wanted).abs().max() / wanted.std())


def compared(chosen: argparse.Namespace, prompts: torch.Tensor) -> dict[str, Any]:
    """The three of them, each from the same folder."""
    config = qwen2_config(chosen.shape, max(4096, chosen.prompt + chosen.new))
    found: dict[str, Any] = {}
    how = (prompts, chosen.new, chosen.repeats)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(chosen.device):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(Path(folder))
        del made
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        plain.to(chosen.device)
        found["transformers"], wanted = measure(nullcontext(plain), *how)
        del plain
        streamed = Engine(folder, device=chosen.device, placement=Placement(slots=3))
        found["resident"], logits = measure(streamed.whole_model(spare=0), *how)
        found["resident"]["logits_off"] = off(logits, wanted)
        found["streamed"], logits = measure(streamed.whole_model(), *how)
        found["streamed"] |= {"logits_off": off(logits, wanted), "memory": streamed.memory()}
        found["weights_bytes"] = streamed.num_parameters * 2
        streamed.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    chosen = parse(
        __doc__, arguments,
        shape="3b", rows=8, prompt=128, new=64, repeats=3, device="cuda", streamed_alone=False,
        out=Path,
    )  # fmt: skip
    config = qwen2_config(chosen.shape, max(4096, chosen.prompt + chosen.new))
    torch.manual_seed(0)
    prompts = torch.randint(config.vocab_size, (chosen.rows, chosen.prompt), device=chosen.device)
    found: dict[str, Any] = {"case": case_of(chosen), "environment": environment(chosen.device)}
    if chosen.streamed_alone:
        found["streamed"] = streamed_alone(chosen, prompts)
    else:
        found |= compared(chosen, prompts)
    print(summary(found))
    write(chosen.out, found)


def summary(found: dict[str, Any]) -> str:
    """The result in a line."""
    if "transformers" not in found:
        streamed = found["streamed"]
        ratio = streamed["pass_seconds"] / streamed["bus_seconds"]
        return (
            f"{found['case']['shape']}: a pass takes {streamed['pass_seconds']:.3f} s, {ratio:.2f} "
            f"of what the bus takes, {streamed['tokens_per_second']:.1f} tokens/s"
        )
    plain, *ours = (found[name]["tokens_per_second"] for name in ("transformers", *_OURS))
    told = [
        f"{name} {rate:.1f} ({rate / plain:.2f} of it)"
        for name, rate in zip(_OURS, ours, strict=True)
    ]
    return f"{found['case']['shape']}: transformers {plain:.1f} tokens/s, {', '.join(told)}"


if __name__ == "__main__":
    main()
