"""Predictions for `compute_metrics` and `Trainer.predict`: logits, batch after batch."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from megatrain.api import Engine
from megatrain.base.units import gib
from megatrain.errors import InputError
from megatrain.telemetry.host import host_available_bytes


@dataclass
class Predictions:
    """The predictions of one evaluation.

    Attributes:
        batches: their number; None: unknown.
        keeps: the Trainer keeps the logits of all batches, and copies them with each one.
        limit_bytes: host memory that the process may take; None: no limit.
    """

    batches: int | None
    keeps: bool
    limit_bytes: int | None
    seen: int = 0

    def of(
        self, engine: Engine, inputs: dict[str, Tensor], items: float | None
    ) -> tuple[Any, Tensor, Any]:
        """Loss, logits `[B, T, V]` in fp32 and labels `[B, T]` of a batch, on the CPU.

        The loss is the cross entropy of the labelled tokens, divided by `items`; None: by their
        number. Without labels there is none.

        Raises InputError: the host has no room for the logits that will be kept.
        """
        labels = inputs.get("labels")
        logits = engine.logits({name: value for name, value in inputs.items() if name != "labels"})
        if self.keeps:
            to_come = self.seen + 1 if self.batches is None else self.batches - self.seen
            needed, left = 2 * logits.nbytes * to_come, host_available_bytes(self.limit_bytes)
            if needed > left:
                raise InputError(
                    f"the logits of this evaluation take {gib(needed)} more, copied once, and the "
                    f"host has {gib(left)} left; give preprocess_logits_for_metrics "
                    "(logits.argmax(-1), say), batch_eval_metrics, or fewer rows"
                )
        self.seen += 1
        if labels is None:
            return None, logits, None
        last = logits.shape[1] - engine.label_shift
        predicted, wanted = (
            logits[:, :last].flatten(0, 1),
            labels[:, engine.label_shift :].flatten(),
        )
        total = cross_entropy(predicted, wanted, ignore_index=-100, reduction="sum")
        return total / ((wanted != -100).sum() if items is None else items), logits, labels


def length(dataloader: Any) -> int | None:
    """The number of a data loader's batches; None: a stream, which has no length."""
    try:
        return len(dataloader)
    except TypeError:
        return None
