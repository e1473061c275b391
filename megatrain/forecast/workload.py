"""The size of a step: one record that plans, benchmarks, runs and engines share."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.base.units import parse_bytes
from megatrain.device.disk import disk_bytes
from megatrain.errors import InputError
from megatrain.loss import CROSS_ENTROPY, GRPO, Loss
from megatrain.model.spec import ModelSpec
from megatrain.optim import AdamW, Rule
from megatrain.placement import Placement, Precision

if TYPE_CHECKING:
    from megatrain.config import Config

TOKENS, SEQUENCE_LENGTH = 96 * 1024, 1024
"""Defaults: the tokens of a step, and those of one of its rows."""

LIMITS = ("device_memory", "host_memory", "disk_space")
_USUAL_TOKENS = 16384  # of a micro-batch
# Larger steps are refused: a plan follows a step piece by piece, and these have the same rates.
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Generation:
    """Replies that the model generates between steps, as `megatrain train` does for GRPO."""

    new_tokens: int  # of a reply, at most; a prompt with its reply fits into a row
    rows: int | None = None  # replies that are generated together, at most; None: all of a step
    # True if a frozen reference model computes log-probabilities of the replies
    reference: bool = False


@dataclass(frozen=True, eq=False)
class Second:
    """A frozen model that is streamed before each step; plans call it by its `name`."""

    name: str
    spec: ModelSpec


@dataclass(frozen=True, eq=False)
class MediaRow:
    """A row with images or sounds: `input_ids` `[1, T]`, and the processor's other tensors."""

    tensors: Mapping[str, Tensor]

    @cached_property
    def digest(self) -> str:
        """A key that is equal for rows of equal work: names, shapes, dtypes, and integer values.

        Pixels and sounds count by shape alone.
        """
        parts = []
        for name, value in sorted(self.tensors.items()):
            integers = () if value.is_floating_point() else tuple(value.flatten().tolist())
            parts.append((name, tuple(value.shape), str(value.dtype), *integers))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def length(self) -> int:
        return self.tensors["input_ids"].shape[1]

    def of(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """`rows` such rows, padded with 0 to `tokens`. Raises InputError: a row has more tokens."""
        length = self.length
        if length > tokens:
            raise InputError(
                f"the images of a row take {length:,} tokens, more than the row's {tokens:,}; take "
                "longer rows, or fewer or smaller images"
            )
        filled = {
            name: F.pad(value, (0, tokens - length)) if value.shape == (1, length) else value
            for name, value in self.tensors.items()
        }
        return {n: value.repeat(rows, *[1] * (value.dim() - 1)) for n, value in filled.items()}


@dataclass(frozen=True)
class Workload:
    """The size of a step, how it is computed, and the memory that it may take."""

    tokens_per_step: int = TOKENS
    sequence_length: int = SEQUENCE_LENGTH
    # rows of a micro-batch; None: the planner chooses, as it does a `placement`
    micro_batch: int | None = None
    # True if updates wait for the norm of all gradients, by which they are clipped
    clip: bool = True
    precision: Precision = "bf16"
    compile: bool = True
    rule: Rule = field(default_factory=AdamW)
    placement: Placement | None = None
    # device_memory, host_memory: bytes that the process may take; None: all of the machine's
    device_memory: int | None = None
    host_memory: int | None = None
    disk: str | None = None
    # bytes that planes may take on a disk; None: all that is free in `disk`
    disk_space: int | None = None
    loss: Loss = CROSS_ENTROPY
    ranks: int = 1  # of one host, which share one copy of the model; each takes a step of this size
    hosts: int = 1  # hosts with `ranks` each, and with a copy of the model each
    may_own: bool = False  # True if each rank may own some of the experts
    sequence_ranks: int = 1  # ranks that share every row; 1: each rank has rows of its own
    generation: Generation | None = None
    media: MediaRow | None = None  # the images or sounds that every row has; None: rows have none
    # a model that is streamed before each step. For plans alone: in a run it is loaded before the
    # engine, which gets the memory that is left.
    second: Second | None = None

    @classmethod
    def of_run(cls, run: "Config") -> "Workload":
        training, engine, length = run.training, run.engine, run.data.sequence_length
        placement = engine.placement_value()
        sizes = {name: getattr(engine, name) for name in LIMITS}
        limits: dict[str, Any] = {n: parse_bytes(size) for n, size in sizes.items() if size}
        rows_per_example, examples = run.loss.lines, training.micro_batch_size
        loss, generation = run.loss.loss(), None
        if isinstance(loss, GRPO):
            replies_at_once, has_reference = run.rollout.batch_size, loss.beta > 0
            generation = Generation(loss.max_completion_length, replies_at_once, has_reference)
        return cls(
            tokens_per_step=training.batch_size * length * rows_per_example,
            sequence_length=length,
            micro_batch=examples and examples * rows_per_example,
            loss=loss,
            generation=generation,
            clip=training.max_grad_norm is not None,
            precision=engine.precision,
            sequence_ranks=engine.sequence_parallel,
            rule=run.optimizer.rule(),
            placement=placement if isinstance(placement, Placement) else None,
            disk=engine.disk,
            **limits,
        )

    @property
    def computed(self) -> "Workload":
        """This workload without limits and placement: forecasts depend on nothing else of it."""
        is_compiled = self.compile if self.placement is None else self.placement.compile
        unset: dict[str, Any] = dict.fromkeys(("placement", "disk", *LIMITS))
        return replace(self, compile=is_compiled, **unset)

    @property
    def for_loading(self) -> dict[str, Any]:
        """Arguments of `Engine` and `Engine.load`: a step's size, the memory that it may take."""
        names = ("tokens_per_step", "sequence_length", "micro_batch", "loss", "generation", "disk")
        return {name: getattr(self, name) for name in (*names, *LIMITS)}

    @property
    def for_engine(self) -> dict[str, Any]:
        """Arguments of `Engine`, without the norm to clip by."""
        placement = self.placement or "auto"
        options = {"precision": self.precision, "optimizer": self.rule, "placement": placement}
        return self.for_loading | options

    @property
    def disk_bytes(self) -> int | None:
        """Bytes that planes may take on a disk; None: no disk. Raises InputError: no such disk."""
        return self.disk_space if self.disk is None else disk_bytes(self.disk, self.disk_space)

    @property
    def all_ranks(self) -> int:
        """The number of ranks, on all hosts, that take a step together."""
        return self.ranks * self.hosts

    def shared(self, ranks: int, hosts: int = 1) -> "Workload":
        """One rank's part of a workload that `ranks` on each of `hosts` compute together."""
        all_ranks = ranks * hosts
        rows = -(-self.rows * self.sequence_ranks // all_ranks)
        length = -(-self.sequence_length // self.sequence_ranks)
        generation = self.generation
        if generation is not None and generation.rows is not None:
            generation = replace(generation, rows=-(-generation.rows // all_ranks))
        is_one_host_of_whole_rows = ranks > 1 and hosts == 1 and self.sequence_ranks == 1
        return replace(
            self,
            tokens_per_step=rows * length,
            micro_batch=self.micro_batch and min(self.micro_batch, rows),
            sequence_length=length,
            may_own=is_one_host_of_whole_rows and not self.rule.needs_matrices,
            ranks=ranks,
            hosts=hosts,
            generation=generation,
        )

    @property
    def rows(self) -> int:
        return max(1, self.tokens_per_step // self.sequence_length)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers are computed in."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def usual_micro_batch(self) -> int:
        """Rows of a micro-batch where neither the user nor a forecast chooses their number."""
        return min(self.rows, self.micro_batch or usual_micro_batch(self.sequence_length))

    def check(self) -> None:
        """Raises InputError: no step can have this size, or it is too large to be planned."""
        if self.sequence_length < 2:
            raise InputError(f"sequences of {self.sequence_length} tokens teach nothing; take 2")
        if self.tokens_per_step < self.sequence_length:
            raise InputError(
                f"a step of {self.tokens_per_step:,} tokens holds no sequence of "
                f"{self.sequence_length:,}; take more tokens or shorter sequences"
            )
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.rows:
            raise InputError(
                f"a micro-batch of {self.micro_batch:,} rows is not between 1 and those of a step "
                f"({self.rows:,}); take so many, or more tokens a step"
            )
        if self.tokens_per_step > _MOST_TOKENS:
            raise InputError(
                f"{self.tokens_per_step:,} tokens a step are more than can be planned "
                f"({_MOST_TOKENS:,}); from there on time grows with the tokens"
            )


def usual_micro_batch(sequence_length: int) -> int:
    """Rows of a micro-batch: enough to keep a large GPU busy, few enough for a small one."""
    return max(1, _USUAL_TOKENS // sequence_length)
