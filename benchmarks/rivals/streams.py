"""TrainStream, with the weights offloaded, or left to choose by itself.

Offloaded, the model is bf16 and TrainStream keeps fp32 masters and moments in host memory. Left to
choose it may move everything to the device, where masters and moments have the model's dtype: so
there the model is fp32 and computes under autocast, as its documentation shows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.case import ADAMW, MAX_GRAD_NORM, Task
from benchmarks.rivals.common import Runner, num_parameters, random_model, torch_device


def build(task: Task) -> Runner:
    """The wrapped model; `task.options["offload"]` is True or "auto"."""
    import trainstream

    always = task.options["offload"] is True
    device = torch_device(task.case)
    model = random_model(task.case, torch.bfloat16 if always else torch.float32).cpu()
    torch.cuda.empty_cache()
    count = num_parameters(model)
    chosen: dict[str, Any] = {"offload": "auto"}
    if always:
        chosen = {"offload": True, "param_offload": True, "activation_offload": False}
    chosen |= {"moment_dtype": "float32", "quantize": "none", "max_grad_norm": MAX_GRAD_NORM}
    chosen["accumulation_steps"] = task.num_micro_batches
    model, optimizer = trainstream.wrap(
        model,
        torch.optim.AdamW(model.parameters(), **ADAMW),
        blocks=list(model.model.layers),
        device=str(device),
        **chosen,
    )

    def compute() -> AbstractContextManager[Any]:
        return nullcontext() if always else torch.autocast(device.type, dtype=torch.bfloat16)

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for ids in micro_batches:
            ids_BT = ids.to(device, non_blocking=True)
            with compute():
                loss = model(ids_BT, labels=ids_BT).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    def report() -> dict[str, Any]:
        said = trainstream.memory_report(model)
        return {"resident": said["resident"], "events": said["events"]}

    dtype = "bfloat16" if always else "float32, autocast to bfloat16"
    settings = {"gradient_checkpointing": True, "model_dtype": dtype, **chosen}
    return Runner(count, step, settings, report)
