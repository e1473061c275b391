"""`python -m benchmarks.predictions [FILE ...]`: measured steps beside what is foretold of them.

Takes results of `python -m benchmarks.step` and prints a table in Markdown: seconds, device and
host memory, measured and foretold, with the errors. Without arguments: all in benchmarks/results,
but for steps whose placement had a choice that has been given up.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.step import rule_named
from megatrain.cli.models import lora_adapter, qwen2_config
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine, machine_for
from megatrain.optim import AdamW, Rule
from megatrain.placement import Placement, renamed
from megatrain.source.source import Base, open_source, structure

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30
HEAD = (
    "| step | seconds | foretold | error | device, GiB | foretold | error "
    "| host, GiB | foretold | error |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Prediction:
    """A measured step and what is foretold of it."""

    result: dict[str, Any]
    forecast: Forecast

    def pairs(self) -> Iterator[tuple[float, float]]:
        """`(measured, foretold)`: seconds, device GiB (the context not counted), host GiB."""
        told = self.forecast
        yield self.result["median_seconds"], told.seconds
        device = told.device_held_bytes - told.device_bytes["context"]
        yield self.result["memory"]["device_peak_bytes"] / GIB, device / GIB
        yield self.result["host_peak_bytes"] / GIB, told.host_peak_bytes / GIB

    def errors(self) -> list[float]:
        """Foretold over measured, less one."""
        return [told / measured - 1 for measured, told in self.pairs()]

    def row(self) -> str:
        """A line of the table."""
        cells = [
            f"{measured:.2f} | {told:.2f} | {told / measured - 1:+.1%}"
            for measured, told in self.pairs()
        ]
        return f"| {', '.join(self._what())} | {' | '.join(cells)} |"

    def _what(self) -> Iterator[str]:
        """The case, and of its placement what is not the simplest."""
        case, placement = self.result["case"], self.forecast.placement
        layers = f" of {case['layers']} layers" if case["layers"] else ""
        rows = f"{case['sequences']} x {case['sequence_length']} by {case['micro_batch']}"
        yield f"{case['shape'].upper()}{layers}, {rows}"
        gpu = self.result["environment"]["gpu"]["name"].removeprefix("NVIDIA ").split()[0]
        if gpu != "H200":
            yield gpu
        if not case["max_grad_norm"]:
            yield "no clipping"
        if (name := case.get("optimizer", "adamw")) != "adamw":
            yield name.capitalize()
        if (states := case.get("states", "fp32")) != "fp32":
            yield f"{states} states"
        if case["precision"] != "bf16":
            yield str(case["precision"])
        if (master := case.get("master", 32)) != 32:
            yield f"{master}-bit master"
        if case.get("lora_r"):
            yield f"LoRA of rank {case['lora_r']}"
        if case.get("base", "bf16") != "bf16":
            yield f"{case['base']} base"
        if documents := case.get("documents"):
            yield f"{documents} documents a row"
        if placement.passes > 1:
            yield f"{placement.passes} passes"
        if placement.resident:
            yield f"{len(placement.resident)} resident"
        if placement.keep_weights:
            yield f"weights of {placement.keep_weights} stay"
        if placement.save_activations:
            whole = " whole" * (placement.save_all == placement.save_activations)
            yield f"{placement.save_activations} kept{whole}"
        if placement.offload_activations:
            yield f"{placement.offload_activations} kept on the host"
        if placement.chunk_tokens:
            yield f"tiles of {placement.chunk_tokens}"
        on_host = ["boundaries"] if placement.layer_inputs == "host" else []
        if placement.save_attention == "host":
            on_host.append("attention")
        elif placement.save_attention == "device":
            yield "attention kept"
        if on_host:
            yield f"{' and '.join(on_host)} on the host"


def predict(result: dict[str, Any]) -> Prediction:
    """What is foretold of a measured step, by the rates of its machine."""
    case = result["case"]
    placement = placement_of(result)
    model = case["shape"], case["layers"], case["sequence_length"], case.get("lora_r", 0)
    base = case.get("base", "bf16")
    forecasts = model_forecasts(*model, base)
    workload = Workload(
        result["tokens_per_step"],
        case["sequence_length"],
        case["micro_batch"],
        case["max_grad_norm"] is not None,
        case["precision"],
        placement.compile,
        rule_of(case),
    )
    machine = machine_of(result)
    if (ranks := case.get("sequence_parallel", 1)) > 1:
        machine = machine.shared(ranks, machine.link_gbps)
        workload = replace(workload, sequence_ranks=ranks).shared(ranks)
    return Prediction(result, forecasts.of(machine, placement, workload, case["micro_batch"]))


def rule_of(case: dict[str, Any]) -> Rule:
    """The optimizer of a case."""
    if (name := case.get("optimizer", "adamw")) != "adamw":
        return rule_named(name)
    return AdamW(states=case.get("states", "fp32"), master=case.get("master", 32))


def placement_of(result: dict[str, Any]) -> Placement:
    """The placement in use; choices that did not exist yet are as they are now."""
    known = {n: value for n, value in renamed(placed(result)).items() if n in Placement.names()}
    return Placement(**known | {"resident": tuple(known.get("resident", ()))})


def placed(result: dict[str, Any]) -> dict[str, Any]:
    """The choices of a result's placement, by their names at that time."""
    return result.get("placement") or result["case"]["placement"]


def machine_of(result: dict[str, Any]) -> Machine:
    """The rates measured for the result, or those that its GPU is listed with now."""
    recorded = result.get("machine")
    if recorded and recorded["measured"]:
        return Machine(**{name: value for name, value in recorded.items() if name != "unified"})
    environment, memory = result["environment"], result["memory"]
    return machine_for(
        environment["gpu"]["name"],
        environment["host_limit_bytes"],
        environment["usable_cores"],
        memory["device_total_bytes"],
        precision=result["case"]["precision"],
    )


@cache
def model_forecasts(
    shape: str, layers: int | None, tokens: int, lora_r: int = 0, base: Base = "bf16"
) -> ForecastCache:
    """Of a benchmark's model; no weights are made."""
    config = qwen2_config(shape, tokens, layers)
    return ForecastCache(structure(open_source(config, adapter=lora_adapter(lora_r), base=base)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    files = options.files or sorted(RESULTS.glob("step-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    on_gpu = [r for r in results if r.get("benchmark") == "step" and r["environment"]["gpu"]]
    if not options.files:
        on_gpu = [r for r in on_gpu if renamed(placed(r)).keys() <= {*Placement.names()}]
    print(HEAD)
    worst = [0.0, 0.0, 0.0]
    for result in on_gpu:
        prediction = predict(result)
        print(prediction.row(), flush=True)
        worst = [max(w, abs(e)) for w, e in zip(worst, prediction.errors(), strict=True)]
    seconds, device, host = worst
    print(f"\n{len(on_gpu)} steps; largest error of seconds {seconds:.1%}, of device memory "
          f"{device:.1%}, of host memory {host:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
