"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded, its settings tuned for one GPU.

DeepSpeedCPUAdam is built on first use by DeepSpeed itself, with a C++ compiler and ninja.
"""

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.case import ADAMW, MAX_GRAD_NORM, Task
from benchmarks.rivals.common import (
    Runner,
    num_parameters,
    random_model,
    start_process_group,
    torch_device,
)


def settings(task: Task, pinned: bool) -> dict[str, Any]:
    """The configuration, with https://www.deepspeed.ai/docs/config-json/ for what each means."""
    host = {"device": "cpu", "pin_memory": pinned}
    return {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": task.num_micro_batches,
        "gradient_clipping": MAX_GRAD_NORM,
        # Masters and moments stay fp32. Clipping would show what this check looks for.
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": host,
            "offload_optimizer": host,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 10**9,
            "reduce_bucket_size": 2 * 10**8,
            "stage3_prefetch_bucket_size": 2 * 10**8,
            "stage3_param_persistence_threshold": 10**5,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 10**9,
    }


def build(task: Task) -> Runner:
    """Everything in host memory."""
    os.environ["LOCAL_RANK"] = "0"
    start_process_group(task.case)

    import deepspeed

    device = torch_device(task.case)
    model = random_model(task.case, torch.bfloat16)
    count = num_parameters(model)
    config = settings(task, pinned=device.type == "cuda")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for ids in micro_batches:
            ids_BT = ids.to(device, non_blocking=True)
            loss = engine(ids_BT, labels=ids_BT).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(micro_batches)
        return float(total)

    chosen = {
        "gradient_checkpointing": True,
        "optimizer": type(engine.optimizer.optimizer).__name__,
    }
    return Runner(count, step, {**chosen, "config": config})
