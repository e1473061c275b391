"""Tokens a second of `megatrain generate` beside transformers' own.

Random weights of a shape, a batch of random prompts, greedy, no end token: resident through
transformers alone, resident, and streamed from host memory. Each is run
once before it is measured. Prints a line, and writes JSON to `--out`.

With `--streamed-alone`, for models that fit neither the GPU nor the disk: seconds of a pass over
the weights (one for the prompts, one for each further token) beside those that their bytes take to
cross the bus.

With the shape of a mixture of experts, such as `qwen3-30b-a3b` (`--layers` of it, its experts kept
as `--base`): seconds and bytes of a pass that makes a token of each row, if layers are read whole,
and if only the chosen experts are read.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from benchmarks.configurations import CONFIGS, configuration
from benchmarks.options import case_of, parse, write
from megatrain import Engine, Placement
from megatrain.base.units import GIB
from megatrain.cli.models import qwen2_config
from megatrain.device.base import COPY_IN
from megatrain.engine import whole_model
from megatrain.source.source import Alike
from megatrain.telemetry.host import environment

_OURS = ("resident", "streamed")
_WAYS = {"whole": 0.0, "chosen": 1.0}  # of reading a layer's experts, with their whole_model._FEW


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


def both_ways(chosen: argparse.Namespace, prompts: torch.Tensor) -> dict[str, Any]:
    """Seconds and bytes of a pass of a mixture, read in both ways; the head stays on the device."""
    config = configuration(chosen.shape, chosen.layers or None)
    config.dtype = torch.bfloat16
    engine = Engine(
        Alike(config),
        device=chosen.device,
        base=chosen.base,
        placement=Placement(slots=3, keep_weights=1),
    )
    crossed, copy = [0], engine.device.copy
    found, texts = dict[str, Any](), []

    def counted(stream: str, to: Any, source: Any, numel: int | None = None) -> None:
        crossed[0] += source.data[:numel].nbytes * (stream == COPY_IN)
        copy(stream, to, source, numel)

    def taken(model: Any, new: int) -> tuple[float, int, torch.Tensor]:
        start, before = time.perf_counter(), crossed[0]
        made = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new,
            max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True,
        ).cpu()  # fmt: skip
        return time.perf_counter() - start, crossed[0] - before, made

    for way, few in _WAYS.items():
        with (
            mock.patch.object(engine.device, "copy", counted),
            mock.patch.object(whole_model, "_FEW", few),
            engine.whole_model() as model,
        ):
            taken(model, chosen.new)
            firsts, each = zip(
                *((taken(model, 1), taken(model, chosen.new)) for _ in range(chosen.repeats)),
                strict=True,
            )
        texts.append(each[0][2])
        seconds = [(a[0] - b[0]) / (chosen.new - 1) for a, b in zip(each, firsts, strict=True)]
        num_bytes = (each[0][1] - firsts[0][1]) / (chosen.new - 1)
        found[way] = {"pass_seconds": median(seconds), "each": seconds, "pass_bytes": num_bytes}
    found["same_tokens"], found["memory"] = texts[0].equal(texts[1]), engine.memory()
    engine.close()
    found["bus_bytes_per_second"] = bus_rate(torch.device(chosen.device))
    return found


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
        layers=0, base=["bf16", "nf4", "fp8"], out=Path,
    )  # fmt: skip
    mixture = chosen.shape in CONFIGS
    config = (
        configuration(chosen.shape)
        if mixture
        else qwen2_config(chosen.shape, max(4096, chosen.prompt + chosen.new))
    )
    torch.manual_seed(0)
    prompts = torch.randint(config.vocab_size, (chosen.rows, chosen.prompt), device=chosen.device)
    found: dict[str, Any] = {"case": case_of(chosen), "environment": environment(chosen.device)}
    if mixture:
        found |= both_ways(chosen, prompts)
    elif chosen.streamed_alone:
        found["streamed"] = streamed_alone(chosen, prompts)
    else:
        found |= compared(chosen, prompts)
    print(summary(found))
    write(chosen.out, found)


def summary(found: dict[str, Any]) -> str:
    """The result in a line."""
    if "whole" in found:
        ways = [
            f"{way} {found[way]['pass_seconds'] * 1e3:.1f} ms, "
            f"{found[way]['pass_bytes'] / GIB:.3f} GiB"
            for way in _WAYS
        ]
        same = "the same" if found["same_tokens"] else "other"
        return f"{found['case']['shape']}: a pass takes {', '.join(ways)}; {same} tokens"
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
