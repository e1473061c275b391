"""The roof of the usual stack: a model that fits, forward and backward, no optimizer at all."""

import torch
from torch import Tensor

from benchmarks.rivals.case import Task
from benchmarks.rivals.common import Runner, num_parameters, random_model, torch_device


def build(task: Task) -> Runner:
    """bf16 weights and gradients on the device."""
    model = random_model(task.case, torch.bfloat16)
    device = torch_device(task.case)

    def step(micro_batches: list[Tensor]) -> float:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for ids in micro_batches:
            ids_BT = ids.to(device, non_blocking=True)
            loss = model(ids_BT, labels=ids_BT).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return float(total)

    return Runner(num_parameters(model), step, {"gradient_checkpointing": True})
