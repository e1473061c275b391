"""Runs the engine's own step on the trace device."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from megatrain import AdamW, Placement
from megatrain.checkpoint.snapshot import Snapshot, StagingBlocks, tile_file
from megatrain.device import CpuDevice, disk
from megatrain.device.base import COMPUTE
from megatrain.engine import sink
from megatrain.engine.assemble import Assembly
from megatrain.engine.batch import Intake
from megatrain.engine.head import Head
from megatrain.engine.step import forward_only, train_step
from megatrain.loss import CROSS_ENTROPY, JointLoss, Loss
from megatrain.model.probe import spec
from megatrain.model.program import ModelProgram
from megatrain.optim import StreamedOptimizer
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.source.source import open_source, packed_weights
from megatrain.source.tiles import Model
from megatrain.store.store import Store
from tests.families.tiny import decoder_sizes
from tests.race.trace import TraceDevice
from tests.rules import SWEPT

T = TypeVar("T")

# Nothing; the ends of the stack and the table; one layer among streamed ones.
RESIDENT = ((), ("embedding", "layer 0", "head"), ("layer 2",))

VOCAB = 200  # the head takes three slots
PIECE = 256  # elements of a gradient sent at once: a layer has three, the head seven

# Graphs, or attention's results, that wait; and the steps in which they may not on the host.
WAITING: tuple[dict, ...] = (
    *({}, {"offload_activations": 3}, {"save_attention": "host"}),
    {"save_activations": 2, "save_all": 1},
)
CLOSED = ((), (1,))

# With several passes rows stay on the device.
KEPT_ROWS: tuple[dict, ...] = ({"passes": 1}, {"passes": 2}, {"keep_rows": False}, {"passes": 3})
# Nothing on a disk; a layer's states, in fewer pieces than there are lanes; all that can be there.
DISKS: tuple[dict, ...] = (
    *({}, {"disk_moments": 1}, {"disk_moments": 9, "disk_remainder": 9}),
    *({}, {"disk_remainder": 3}, {"disk_weights": 2}),
    {"disk_moments": 9, "disk_remainder": 9, "disk_weights": 9},
)

# Tiles whose weights stay: every other layer, of which one rests there; all.
STAYING = (0, 3, 9)


class Together(JointLoss):
    """Cross entropy, found in two visits of the head."""

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> Tensor:
        return -log_prob_N.sum()


# The first layer that is trained; above 0 nothing before it is, and its matrices are packed.
LOWEST = (0, 0, 2)

LOSSES = (CROSS_ENTROPY, Together(), CROSS_ENTROPY)

WIDE = (False, False, True, False, True)  # some parameters stay in fp32


class Wide(LlamaForCausalLM):
    """With norms, and matrices that two ranks share, that a bf16 model computes with in fp32."""

    _keep_in_fp32_modules_strict = ("layernorm", "model.norm", "down_proj")


STEPS = 3  # enough for every slot, lane and host gradient to be used again


def _program(given: Any, lowest: int = 0) -> tuple[ModelProgram, StreamedOptimizer]:
    model = open_source(given, trust_remote_code=False).model
    for frozen in (model.get_input_embeddings(), *model.model.layers[:lowest]):
        frozen.requires_grad_(not lowest)
    found = spec(model)
    found.packed = packed_weights(found, "nf4" if lowest else "bf16")
    program = ModelProgram(found, torch.device("cpu"), torch.bfloat16)
    return program, StreamedOptimizer(AdamW(), model)


@functools.cache
def tiny_program(
    tied: bool, vocab_size: int = VOCAB, lowest: int = 0, wide: bool = False
) -> tuple[ModelProgram, StreamedOptimizer]:
    """Five layers: more than any number of slots tried."""
    config = LlamaConfig(**decoder_sizes(vocab_size, 8, 16, 5, 2), tie_word_embeddings=tied)
    return _program(Wide(config) if wide else config, lowest)


@functools.cache
def tiny_program_with_experts(tied: bool) -> tuple[ModelProgram, StreamedOptimizer]:
    config = MixtralConfig(
        **decoder_sizes(VOCAB, 8, 16, 5, 2, 2),
        num_local_experts=6,
        output_router_logits=True,
        tie_word_embeddings=tied,
    )
    return _program(config)


def schedules() -> Iterator[dict]:
    """Every schedule the engine can choose, as arguments of `trace`."""
    rest = itertools.cycle(
        itertools.product((1, 3, None), KEPT_ROWS, RESIDENT, ((), (0, 1)), WAITING, CLOSED)
    )
    disks, staying = itertools.cycle(DISKS), itertools.cycle(STAYING)
    turns = {"rule": SWEPT, "loss": LOSSES, "lowest": LOWEST, "wide": WIDE}
    further = {name: itertools.cycle(values) for name, values in turns.items()}
    for slots, boundaries, clip, tied, precision in itertools.product(
        (0, 1, 2, 3, 4), ("device", "host"), (1.0, None), (False, True), ("bf16", "fp32")
    ):
        for prefetch in range(max(1, slots)):
            lanes_tried = (1, 3) if boundaries == "host" else (1,)
            grads_tried = (2, 9) if clip is None else (2,)  # with 9, no tile waits for another's
            for lanes, host_grads in itertools.product(lanes_tried, grads_tried):
                gradient_lanes, rows, resident, saves, waiting, closed = next(rest)
                placement = Placement(
                    slots=slots,
                    prefetch=prefetch,
                    host_grad_buffers=host_grads,
                    layer_inputs=boundaries,
                    layer_input_lanes=lanes,
                    gradient_lanes=gradient_lanes,
                    resident=resident,
                    **rows,
                    **waiting,
                    **next(disks),
                    keep_weights=next(staying),
                )
                yield {
                    "placement": placement,
                    "max_grad_norm": clip,
                    "tied": tied,
                    "precision": precision,
                    "saves": saves,
                    "closed": closed,
                } | {name: next(each) for name, each in further.items()}
    yield from shared_schedules()


class Alike(Ranks):
    """A rank whose others have the same micro-batches."""

    def all_gather_object(self, value: T) -> list[T]:
        return [value] * self.size


@dataclass(frozen=True)
class Told(Alike):
    """A rank that is told what each of them says; the first to be asked are only listened to."""

    said: dict[int, Any] = field(default_factory=dict)

    def all_gather_object(self, value: T) -> list[T]:
        self.said.setdefault(self.rank, value)
        return [self.said.get(rank, value) for rank in range(self.size)]


def shared_schedules() -> Iterator[dict]:
    """Those of the second of three ranks, of four on two hosts, or of one on each of two hosts."""
    every = itertools.cycle((Alike(1, 3), Alike(1, 4, hosts=2), Alike(1, 3), Alike(1, 2, hosts=2)))
    rest = itertools.cycle(itertools.product((False, True), KEPT_ROWS, STAYING))
    disks, saves = itertools.cycle(DISKS), itertools.cycle(((), (0, 1), ()))
    rules = itertools.cycle(("adamw", "muon", "adamw int8", "muon clipped", "lion"))
    losses, experts = itertools.cycle(LOSSES), itertools.cycle((False, False, True, False))
    wide = itertools.cycle(WIDE)
    places = itertools.product((1, 3), ("device", "host"), (1.0, None), RESIDENT)
    for slots, boundaries, clip, resident in places:
        tied, rows, staying = next(rest)
        ranks, rule, with_experts = next(every), next(rules), next(experts)
        placement = Placement(
            own_experts=with_experts and ranks.hosts == 1 and "muon" not in rule,
            slots=slots,
            layer_inputs=boundaries,
            layer_input_lanes=1,
            resident=resident,
            **rows,
            **next(disks),
            keep_weights=staying,
        )
        yield {
            "placement": placement,
            "max_grad_norm": clip,
            "tied": tied,
            "saves": next(saves),
            "rule": rule,
            "loss": next(losses),
            "experts": with_experts,
            "wide": next(wide),
            "ranks": ranks,
        }


def trace(
    placement: Placement,
    max_grad_norm: float | None,
    tied: bool,
    precision: str = "bf16",
    saves: tuple[int, ...] = (),
    closed: tuple[int, ...] = (),
    experts: bool = False,
    rule: str = "adamw",
    loss: Loss = CROSS_ENTROPY,
    ranks: Ranks = ALONE,
    lowest: int = 0,
    wide: bool = False,
    rows: Sequence[int] = (2, 1, 3),
    compared: bool = False,
    without: frozenset[str] = frozenset(),
) -> TraceDevice:
    """The device after a few steps and an evaluation of uneven micro-batches.

    After the steps in `saves` a save begins, of planes that are `compared` before; in those in
    `closed` nothing waits on the host that can be computed again.
    """
    device = TraceDevice(without=without)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if experts:
        program, optimizer = tiny_program_with_experts(tied)
    else:
        program, optimizer = tiny_program(tied, VOCAB, lowest, wide)
    if rule != optimizer.rule.name:
        optimizer = StreamedOptimizer(SWEPT[rule](), program.spec.capture.model)
    model = Model(program.spec, optimizer.rule, ranks.shards.size, precision=precision)
    layouts = model.placed(placement).layouts
    with mock.patch.object(sink, "PIECE", PIECE), mock.patch.object(disk, "PIECE", 2 * PIECE):
        given = {"rule": optimizer.rule, "placement": placement, "rank": ranks.shards.rank}
        store = Store(device, layouts, dtype, **given)
        assembly = Assembly(device, program, store, dtype, placement, ranks, "step")
        parts = assembly.training(optimizer, max_grad_norm)
    micro_batches = [
        {"input_ids": torch.ones(each, 4).long(), "labels": torch.ones(each, 4).long()}
        for each in rows
    ]
    setup = SimpleNamespace(
        source=SimpleNamespace(model=program.spec.capture.model),
        device=CpuDevice(),
        seed=0,
        ranks=ranks,
        sequence_ranks=ALONE,
    )
    batch = Intake(setup, program, parts.embedding.rows_each, print).prepared(micro_batches, loss)
    for step in range(STEPS):
        taken = parts.with_policies(assembly.policies(host=step not in closed))
        # As the engine does: a joint loss, or that of routers, sees all micro-batches at once.
        joint = isinstance(loss, JointLoss) or program.spec.routed
        train_step(replace(taken, passes=1) if joint else taken, batch)
        if step in saves:
            if compared:
                assembly.checks.put_comparisons()
            files = [tile_file(tile, tile.name) for tile in store.tiles]
            Snapshot(StagingBlocks(device, 0, None)).start(device, files)
        forward_only(parts, batch, Head.loss)
    return device


def generating(base: Any, without: str = "") -> TraceDevice:
    """The device after passes in which each layer reads the experts that it has chosen."""
    device, (program, _) = TraceDevice(frozenset({without})), tiny_program_with_experts(False)
    packed = packed_weights(program.spec, base, frozen=True)
    with mock.patch.object(program.spec, "packed", packed):
        layouts, placement = Model(program.spec, None).layouts, Placement(slots=2, prefetch=1)
    store = Store(device, layouts, torch.bfloat16, rule=None, placement=placement)
    parts = Assembly(device, program, store, torch.bfloat16, placement, ALONE).inference()
    units = [*parts.trunk, parts.head]
    stacks = {t.index: [e for e in t.layout.entries if len(e.shape) == 3] for t in store.tiles}
    for _ in range(STEPS):
        parts.stream.begin(units, stacks)
        for unit, slot in parts.stream.visit(units):
            device.run(COMPUTE, "route", lambda: None, [slot])
            if stack := stacks[unit.tile.index]:
                parts.stream.bring(unit.tile, stack, torch.tensor([[4, 1], [6, 4]]))
    return device
