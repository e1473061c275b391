"""A model of a published shape and random rows for it: what a benchmark runs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatrain.cli.shapes import qwen2_config
from megatrain.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.engine import Engine

ROWS = 16  # of a micro-batch, where nobody chooses


@dataclass(frozen=True)
class StepCase:
    """What one measurement of the training step did."""

    shape: str
    layers: int | None
    sequences: int
    sequence_length: int
    micro_batch: int | None
    max_grad_norm: float | None
    precision: Literal["bf16", "fp32"]
    device: str
    placement: dict[str, Any] | None
    warmup: int
    steps: int
    seed: int
    device_memory: str | None = None
    host_memory: str | None = None


def build_engine(case: StepCase) -> "Engine":
    """An engine with random weights, as `case` says."""
    from megatrain.engine import Engine
    from megatrain.optim import AdamW

    return Engine(
        qwen2_config(case.shape, case.sequence_length, case.layers),
        optimizer=AdamW(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        max_grad_norm=case.max_grad_norm,
        precision=case.precision,
        placement="auto" if case.placement is None else Placement(**case.placement),
        device=None if case.device == "auto" else case.device,
        seed=case.seed,
        tokens_per_step=case.sequences * case.sequence_length,
        sequence_length=case.sequence_length,
        micro_batch=case.micro_batch,
        device_memory=case.device_memory,
        host_memory=case.host_memory,
    )


def random_step(case: StepCase, vocab_size: int, seed: int) -> "list[dict[str, Tensor]]":
    """The micro-batches of one step of random tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (case.sequences, case.sequence_length)
    ids_BT = torch.randint(vocab_size, shape, generator=generator)
    rows = case.micro_batch or ROWS
    return [{"input_ids": part, "labels": part} for part in ids_BT.split(rows)]


def statistics_of(times: Sequence[float], tokens: int, parameters: int) -> dict[str, Any]:
    """What a result says of its measured steps."""
    median = statistics.median(times)
    return {
        "count": len(times),
        "median_seconds": median,
        "min_seconds": min(times),
        "max_seconds": max(times),
        "tokens_per_second": tokens / median,
        "model_tflops": 6 * parameters * tokens / median / 1e12,
    }
