"""What verl asks of a training engine (its BaseEngine), over a MegaTrain engine on one GPU.

verl is not imported: derive from `verl.workers.engine.base.BaseEngine` as well, and register the
class with its EngineRegistry. A batch has `input_ids`, `attention_mask` and `response_mask`, all
`[B, T]`; a loss function takes the log-probabilities of the tokens `[B, T]` and the batch, and
returns the loss of all of it and what is measured.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain import Engine
from megatrain.loss import JointLoss

LossFunction = Callable[[dict[str, Tensor], Mapping[str, Any]], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class FunctionLoss(JointLoss):
    """Any function of the log-probabilities of a whole batch; it does its own averaging."""

    function: LossFunction
    data: Mapping[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> Tensor:
        rows = len(self.data["input_ids"])
        # A position has the log-probability of the token after it; the function wants it there.
        log_probs = log_prob_N.view(rows, -1).roll(1, 1)
        loss, metrics = self.function({"log_probs": log_probs}, self.data)
        self.metrics.update(metrics)
        return loss

    def normaliser(self, targets: Any, given: Any) -> float:
        return 1.0


class MegatrainEngine:
    """One process, one GPU; state rests in host memory, so nothing is moved between phases."""

    def __init__(
        self, make: Callable[[], Engine], schedule: Callable[[Any], Any], micro_batch: int
    ) -> None:
        """Args: what makes the engine, and of its optimizer a schedule; rows of a micro-batch."""
        self._make, self._schedule, self._rows = make, schedule, micro_batch

    def initialize(self) -> None:
        self.engine = self._make()
        self.scheduler = self._schedule(self.engine.optimizer)

    def train_mode(self) -> Any:
        return nullcontext()  # a step trains, infer_batch does not

    eval_mode = train_mode

    def optimizer_zero_grad(self) -> None:
        """Gradients live within a step."""

    def train_batch(self, data: Mapping[str, Any], loss_function: LossFunction) -> dict[str, Any]:
        """Forward, backward and update, in one layer-major step over all micro-batches."""
        loss = FunctionLoss(loss_function, data)
        result = self.engine.step(self._split(data), loss)
        return {"metrics": {**loss.metrics, "loss": result.loss, "grad_norm": result.grad_norm}}

    def infer_batch(self, data: Mapping[str, Any], loss_function: Any = None) -> dict[str, Any]:
        found = torch.cat(self.engine.logprobs(self._split(data)))
        output: dict[str, Any] = {"model_output": {"log_probs": found}, "metrics": {}}
        if loss_function is not None:
            loss, output["metrics"] = loss_function({"log_probs": found}, data)
            output["metrics"] |= {"loss": float(loss)}
        return output

    def lr_scheduler_step(self) -> list[float]:
        self.scheduler.step()
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """For an inference server: fp32 masters."""
        yield from self.engine.named_masters()

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> None:
        return None

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Nothing to move: between steps the device holds what the placement keeps there."""

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: Any = None,
        global_step: int = 0,
        max_ckpt_to_keep: Any = None,
    ) -> None:
        extra = {"scheduler": self.scheduler.state_dict(), "step": global_step}
        self.engine.save(Path(local_path), extra=extra)

    def load_checkpoint(self, local_path: str, **ignored: Any) -> None:
        from megatrain.checkpoint import open_checkpoint

        self.engine.close()
        self.engine = Engine.load(local_path)
        groups = self.engine.optimizer.state_dict()
        self.scheduler = self._schedule(self.engine.optimizer)  # sets its first rates
        self.scheduler.load_state_dict(open_checkpoint(local_path).extra["scheduler"])
        self.engine.optimizer.load_state_dict(groups)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def shutdown(self) -> None:
        self.engine.close()

    def _split(self, data: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        labels = data["input_ids"].masked_fill(data["response_mask"] == 0, -100)
        whole = {"input_ids": data["input_ids"], "labels": labels}
        whole["attention_mask"] = data["attention_mask"]
        parts = {name: each.split(self._rows) for name, each in whole.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
