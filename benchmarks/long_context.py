"""`python -m benchmarks.long_context`: steps of one long row each, on one engine.

Before the first length comes a row of two tiles: what acts on every token alone is compiled for one
tile, whatever the length, and nothing else is compiled. The first step of a length takes and pins
the host memory that its boundaries and attention results wait in. Beneath long rows that goes
unnoticed, so only lengths up to `--warm-to` tokens are warmed up. Results are those of
`benchmarks.step`, one file per length, with the arithmetic of causal attention counted beside.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.options import parse, write
from benchmarks.step import StepCase, build_engine, measure_on
from megatrain.base.units import gib
from megatrain.cli.models import qwen2_config

TILE = 8192
PLACEMENT = {
    "slots": 2,
    "compile": True,
    "chunk_tokens": TILE,
    "layer_inputs": "host",
    "layer_input_lanes": 1,
    "head_tokens": 2048,
    "save_attention": "host",
}


def measure(case: StepCase, lengths: list[int], warm_to: int, output: Path) -> None:
    """Steps of ascending lengths: memory is told at its peak so far, which is the last one's."""
    engine = build_engine(case)
    try:
        short = replace(case, sequence_length=2 * TILE, warmup=0, steps=1)
        measure_on(engine, short)
        for length in sorted(lengths):
            warmup = case.warmup if length <= warm_to else 0
            result = measure_on(engine, replace(case, sequence_length=length, warmup=warmup))
            output.mkdir(parents=True, exist_ok=True)
            name = f"step-{case.shape}-1x{length}.json"
            write(output / name, result)
            print(_line(result), flush=True)
    finally:
        engine.close()


def attention_tflops(result: dict[str, Any]) -> float:
    """TFLOPS with causal attention: half of all pairs, in forward and backward, once each."""
    case = result["case"]
    length = case["sequence_length"]
    config = qwen2_config(case["shape"], length, case["layers"])
    width = config.hidden_size  # of all heads together
    attention = 6 * config.num_hidden_layers * length * width * result["tokens_per_step"]
    model = 6 * result["parameters"] * result["tokens_per_step"]
    return (model + attention) / result["median_seconds"] / 1e12


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['case']['sequence_length']:>8} tokens: {result['median_seconds']:8.2f} s, "
        f"{result['tokens_per_second']:7.0f} tokens/s, {result['model_tflops']:.0f} model TFLOPS, "
        f"{attention_tflops(result):.0f} with causal attention; device "
        f"{gib(result['memory']['device_peak_bytes'])}, host {gib(result['host_peak_bytes'])}"
    )


def main() -> None:
    args = parse(
        __doc__, shape="7b", lengths="32768,131072,262144", warmup=1, warm_to=131072, steps=1,
        layers=int, resident=0, device="auto", output=Path("long-context"),
    )  # fmt: skip
    lengths = [int(length) for length in args.lengths.split(",")]
    case = StepCase(
        shape=args.shape,
        layers=args.layers,
        sequences=1,
        sequence_length=max(lengths),
        micro_batch=1,
        max_grad_norm=1.0,
        precision="bf16",
        device=args.device,
        placement=PLACEMENT | {"resident": [f"layer {n}" for n in range(args.resident)]},
        warmup=args.warmup,
        steps=args.steps,
        seed=0,
    )
    measure(case, lengths, args.warm_to, args.output)


if __name__ == "__main__":
    main()
