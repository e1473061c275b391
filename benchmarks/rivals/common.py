"""The model, the tokens and the loss, the same for every rival that runs a Hugging Face model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.case import Case
from megatrain.cli.models import qwen2_config

LOSS_TOKENS = 2048  # whose logits are held in fp32 at once


@dataclass(frozen=True)
class Runner:
    """What a rival has built.

    Attributes:
        step: one optimizer step over micro-batches [rows, tokens] of token ids on the CPU;
            the mean loss.
        settings: everything that was chosen for this rival, for the result.
        report: called after the last step: what the rival says about itself.
        num_trained: parameters that are; None: all.
    """

    num_parameters: int
    step: Callable[[list[Tensor]], float]
    settings: dict[str, Any]
    report: Callable[[], dict[str, Any]] = field(default=dict)
    num_trained: int | None = None


def torch_device(case: Case) -> torch.device:
    """Where to compute."""
    if case.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(case.device)


def random_model(case: Case, dtype: torch.dtype) -> Any:
    """The transformers model on the device: SDPA attention, layers recomputed in backward."""
    from transformers import AutoModelForCausalLM

    config = qwen2_config(case.shape, case.sequence_length, case.layers)
    config.use_cache = False
    torch.manual_seed(case.seed)
    with torch.device(torch_device(case)):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.loss_function = next_token_loss
    return model.train()


def random_tokens(case: Case, vocab_size: int, micro_batch: int, index: int) -> list[Tensor]:
    """The micro-batches of step `index`; the same tokens for every rival."""
    generator = torch.Generator().manual_seed(case.seed + index)
    shape = (case.sequences, case.sequence_length)
    return list(torch.randint(vocab_size, shape, generator=generator).split(micro_batch))


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Mean loss of the next token: transformers' own, without its fp32 copies of all logits.

    Those take three quarters of a micro-batch's memory at this vocabulary. logits [B, T, V],
    labels [B, T], of which those below 0 do not count.
    """
    targets_BT = labels.roll(-1, dims=1)
    weight_BT = (targets_BT >= 0).float()
    weight_BT[:, -1] = 0.0  # nothing follows the last token
    weight_BT /= weight_BT.sum()
    targets_BT = targets_BT.clamp(min=0)
    return _CrossEntropy.apply(
        logits.view(-1, vocab_size), targets_BT.reshape(-1), weight_BT.view(-1)
    )


class _CrossEntropy(torch.autograd.Function):
    """Weighted cross entropy [] of logits [N, V], some rows at once, with its gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, weight_N: Tensor) -> Tensor:
        gradient_NV = torch.empty_like(logits_NV)
        total = torch.zeros((), device=logits_NV.device)
        parts = (each.split(LOSS_TOKENS) for each in (logits_NV, targets_N, weight_N, gradient_NV))
        for logits, targets, weight, gradient in zip(*parts, strict=True):
            probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            picked = targets[:, None]
            total -= (probs.gather(1, picked).squeeze(1) * weight).sum()
            probs.exp_().scatter_add_(1, picked, probs.new_full(picked.shape, -1.0))
            gradient.copy_(probs.mul_(weight[:, None]))
        ctx.save_for_backward(gradient_NV)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV.mul_(outputs[0]), None, None


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def start_process_group(case: Case) -> None:
    """A group of this one process, for rivals that only know groups."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch_device(case).type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
