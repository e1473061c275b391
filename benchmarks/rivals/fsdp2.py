"""FSDP2 with CPUOffloadPolicy, as torch documents it, on one GPU.

Each layer is a unit of its own. Gradients stay on the device until the last micro-batch, all of
them in fp32; where its memory is limited they leave after each.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.rivals.case import ADAMW, MAX_GRAD_NORM, Task
from benchmarks.rivals.common import (
    Runner,
    num_parameters,
    random_model,
    start_process_group,
    torch_device,
)


def build(task: Task) -> Runner:
    """fp32 parameters and moments in host memory, bf16 computation, fp32 reduction."""
    start_process_group(task.case)
    device = torch_device(task.case)
    mesh = init_device_mesh(device.type, (1,))
    model = random_model(task.case, torch.float32)
    count = num_parameters(model)
    pinned = device.type == "cuda"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last_only = task.case.device_memory_bytes is None
    offload = CPUOffloadPolicy(pin_memory=pinned)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for index, ids in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            model.set_requires_gradient_sync(last or not last_only)
            ids_BT = ids.to(device, non_blocking=True)
            loss = model(ids_BT, labels=ids_BT).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    settings = {
        "gradient_checkpointing": True,
        "pin_memory": pinned,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "gradient_sync": "last micro-batch" if last_only else "each micro-batch",
        "optimizer": "torch AdamW, fused, on the CPU",
    }
    return Runner(count, step, settings)
