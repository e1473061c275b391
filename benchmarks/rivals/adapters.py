"""LoRA by PEFT on a model that rests on the device: bf16 base, fp32 adapter, autocast to bf16."""

import torch
from torch import Tensor

from benchmarks.options import num_compilations
from benchmarks.rivals.case import ADAMW, MAX_GRAD_NORM, Task
from benchmarks.rivals.common import Runner, num_parameters, random_model, torch_device
from megatrain.cli.models import lora_adapter


def build(task: Task) -> Runner:
    """Layers are compiled, or recomputed in the backward, as `task.options` say."""
    from peft import LoraConfig, get_peft_model

    model = random_model(task.case, torch.bfloat16)
    if not task.options["checkpointing"]:
        model.gradient_checkpointing_disable()
    adapted = get_peft_model(model, LoraConfig(**(lora_adapter(task.case.lora_r) or {})))
    if task.options["compiled"]:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    device = torch_device(task.case)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=device.type == "cuda", **ADAMW)

    def step(micro_batches: list[Tensor]) -> float:
        total = torch.zeros((), device=device)
        for ids in micro_batches:
            ids_BT = ids.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = adapted(input_ids=ids_BT, labels=ids_BT).loss / len(micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    def report() -> dict[str, int]:
        return {"compilations": num_compilations()}

    count = sum(p.numel() for p in trained)
    return Runner(num_parameters(adapted), step, dict(task.options), report, num_trained=count)
