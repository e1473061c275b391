"""A model that fits the device: the roof of the usual stack, and what its users train it with."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.options import num_compilations
from benchmarks.rivals.case import ADAMW, MAX_GRAD_NORM, Task
from benchmarks.rivals.common import Runner, num_parameters, random_model, torch_device


def build(task: Task) -> Runner:
    """Forward and backward alone in bf16, or with `trains`, compiled, nothing recomputed.

    What trains has fp32 weights, autocast to bf16, exact clipping, and torch's fused AdamW.
    """
    trains, device = task.options.get("trains", False), torch_device(task.case)
    model = random_model(task.case, torch.float32 if trains else torch.bfloat16)
    optimizer: Any = None
    if trains:
        model.gradient_checkpointing_disable()
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        fused = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused, **ADAMW)

    def step(micro_batches: list[Tensor]) -> float:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for ids in micro_batches:
            ids_BT = ids.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=trains):
                loss = model(ids_BT, labels=ids_BT).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
        return float(total)

    def report() -> dict[str, int]:
        return {"compilations": num_compilations()} if trains else {}

    settings = {"gradient_checkpointing": not trains, "compiled": trains, "optimizer": trains}
    return Runner(num_parameters(model), step, settings, report)
