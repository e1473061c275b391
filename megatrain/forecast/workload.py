"""What is trained at a time: the one record of it for plans, benchmarks, runs and engines."""

from dataclasses import dataclass, field

import torch

from megatrain.errors import InputError
from megatrain.optim import AdamW, Rule
from megatrain.placement import Precision

TOKENS, SEQUENCE_LENGTH = 96 * 1024, 1024
"""Of a step and of its rows, where nobody says."""

_USUAL_TOKENS = 16384  # of a micro-batch


@dataclass(frozen=True)
class Workload:
    """The size of a step, and how it is computed.

    Attributes:
        micro_batch: rows of a micro-batch; None: to be chosen.
        clip: by the exact norm of all gradients, for which updates wait.
        compile: layers are compiled.
        rule: of the optimizer.
    """

    tokens_per_step: int = TOKENS
    sequence_length: int = SEQUENCE_LENGTH
    micro_batch: int | None = None
    clip: bool = True
    precision: Precision = "bf16"
    compile: bool = True
    rule: Rule = field(default_factory=AdamW)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return max(1, self.tokens_per_step // self.sequence_length)

    @property
    def dtype(self) -> torch.dtype:
        """What layers are computed in."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def usual_micro_batch(self) -> int:
        """Rows taken together where neither the user nor a forecast says how many."""
        return min(self.rows, self.micro_batch or usual_micro_batch(self.sequence_length))

    def check(self) -> None:
        """Raises InputError: there is no such step."""
        if self.sequence_length < 2:
            raise InputError(f"sequences of {self.sequence_length} tokens teach nothing; take 2")
        if self.tokens_per_step < self.sequence_length:
            raise InputError(
                f"a step of {self.tokens_per_step:,} tokens holds no sequence of "
                f"{self.sequence_length:,}; take more tokens or shorter sequences"
            )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"a micro-batch of {self.micro_batch} rows is empty")
        if self.micro_batch is not None and self.micro_batch > self.rows:
            raise InputError(
                f"a micro-batch of {self.micro_batch:,} rows is more than a step has "
                f"({self.rows:,}); take fewer, or more tokens a step"
            )


def usual_micro_batch(sequence_length: int) -> int:
    """Enough rows to keep a large GPU busy, and few enough for one layer on a small one."""
    return max(1, _USUAL_TOKENS // sequence_length)
