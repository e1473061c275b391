"""MegaTrain itself, with the placement that it chooses."""

from typing import Any

from benchmarks.rivals.case import MAX_GRAD_NORM, Task
from benchmarks.step import StepCase, measure_step


def measure(task: Task) -> dict[str, Any]:
    """The part of a row that comes from the process, as `benchmarks.step` measures it."""
    case = task.case
    result = measure_step(
        StepCase(
            shape=case.shape,
            layers=case.layers,
            sequences=case.sequences,
            sequence_length=case.sequence_length,
            micro_batch=task.micro_batch,
            max_grad_norm=MAX_GRAD_NORM,
            precision="bf16",
            device=case.device,
            placement=task.options.get("placement"),
            warmup=task.warmup,
            steps=case.steps,
            seed=case.seed,
            lora_r=case.lora_r,
            device_memory=None
            if case.device_memory_bytes is None
            else str(case.device_memory_bytes),
        )
    )
    taken = (
        "parameters",
        "trained_parameters",
        "build_seconds",
        "step_seconds",
        "losses",
        "memory",
    )
    return {
        **{name: result[name] for name in taken},
        "device_peak_bytes": result["memory"].get("device_peak_bytes"),
        "micro_batch": result["case"]["micro_batch"],
        "settings": {"placement": result["placement"]},
        "report": {},
    }
