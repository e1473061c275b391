"""Tile updates, where the optimizer's state rests: mostly on a host stream, beside the device.

Muon first turns complete gradients into directions (orthogonalised momentum), on the device. The
momentum that this needs comes from the host during the layer's backward, and goes back. Each of
several ranks averages its block, and makes directions of the matrices with values in that block.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, UPDATE, Kind, Memory, Name
from megatrain.engine.bit_checks import UpdateSums
from megatrain.engine.shared import Shared
from megatrain.engine.sink import Sink
from megatrain.errors import InputError, RunFailed, StepRefused
from megatrain.optim import Plane, PlaneKind, StreamedOptimizer, TileRange, UpdateOptions
from megatrain.store.store import DiskStaging, Lane, Tier, Tile, in_place
from megatrain.tile import Entry, Span, TileKind
from megatrain.tile.layout import MOST_ELEMENTS

_ROOMS = 2  # device buffers for momentum on its way: one is filled while the other is emptied

Settings = Mapping[str, Any]


def give_way(device: Device, tile: Tile, stream: str) -> None:
    """Let `stream`, which will overwrite a tile's planes, wait for saves that still read them."""
    for reader in tile.readers:
        device.wait(stream, reader.event, reader.wait)
        if reader.set_aside is not None:
            device.run(stream, f"set aside {tile.name}", reader.set_aside)
    tile.readers = ()


class Directions:
    """Replaces gradients by a rule's directions (Muon) on the device; most rules have none."""

    def __init__(self, shared: Shared, rule: Any, proceed: Buffer) -> None:
        """Args: `rule`: a Rule, with Muon's `average` and `direct` if it has directions;
        `proceed`: the step's loss; if it is not finite, no state is changed.
        """
        self._device, self._rule, self._proceed = shared.device, rule, proceed
        self._collectives, self._checks = shared.collectives, shared.checks
        device, tiles = shared.device, shared.tiles
        self._directed: dict[int, list[Entry]] = {}  # by tile index
        self._own_spans: dict[int, list[tuple[Entry, Span]]] = {}  # this rank's parts of these
        for tile in tiles:
            entries = [entry for entry in tile.layout.trainable if rule.directed(entry)]
            stops = [(entry, entry.offset + entry.numel) for entry in entries]
            spans = [(e, span) for e, stop in stops for span in tile.spans_of(e.offset, stop)]
            self._directed[tile.index], self._own_spans[tile.index] = entries, spans
        self._fetched: dict[int, Lane] = {}
        with_state = [*filter(self.has_any, tiles)]
        outside = [tile for tile in with_state if tile.layout.kind is not TileKind.LAYER]
        if outside:
            name = self._directed[outside[0].index][0].name
            raise InputError(
                f"{type(rule).__name__} takes {name!r} for a matrix of a layer, but it is outside "
                "of the layers; choose another optimizer"
            )
        moving = [tile for tile in with_state if not tile.rests.local]
        numels = [stop - start for start, stop in map(self._range, moving)]
        names = [Name(Memory.GRADIENTS, f"state {i} of directions") for i in range(_ROOMS)]
        lanes = [Lane(device.empty(name, max(numels), torch.float32)) for name in names if numels]
        for lane in lanes:
            device.run(COMPUTE, "allocate state of directions", lambda: None, writes=[lane.buffer])
            lane.free = device.record(COMPUTE)
        self._next_room = cycle(lanes)

    def has_any(self, tile: Tile) -> bool:
        """True if a tile has parameters whose gradients become directions."""
        return bool(self._directed[tile.index])

    def _state(self, tile: Tile) -> Buffer:
        """The momentum of the tile's directed parameters, where it rests."""
        start, stop = self._range(tile)
        [state] = [buffer for plane, buffer in tile.states.items() if plane.on_device]
        return in_place(self._device, tile, state.piece(start, stop))

    def _range(self, tile: Tile) -> tuple[int, int]:
        """`(start, stop)` of the tile's directed parameters in this rank's plane."""
        spans = [span for _, span in self._own_spans[tile.index]]
        return (spans[0].start, spans[-1].stop) if spans else (0, 0)

    def fetch_state(self, tile: Tile) -> None:
        """Start copying the momentum to the device, before the tile's gradient is complete."""
        if not self.has_any(tile) or tile.rests.local:
            return
        device, state, lane = self._device, self._state(tile), next(self._next_room)
        device.wait(COPY_IN, lane.free, "directions' room free")
        # This copies the newest state: COPY_IN has waited for the tile's update already.
        device.copy(COPY_IN, lane.buffer.piece(0, len(state.data)), state)
        lane.ready = device.record(COPY_IN)
        self._fetched[tile.index] = lane

    def replace_gradients(
        self, tile: Tile, sums: Buffer, settings: Mapping[str, Settings], scale: float = 1.0
    ) -> None:
        """Replace the gradients in `sums`, multiplied by `scale`, by directions.

        Args: `settings`: the optimizer's settings by parameter.
        """
        if not self.has_any(tile):
            return
        self._average(tile, sums, settings, scale)
        self._collectives.complete(sums, f"averages of {tile.name}")

        def work() -> None:
            for entry, span in self._own_spans[tile.index]:
                averages, start = entry.view(sums.data), span.at - entry.offset
                if len(entry.shape) == 3:  # a stack: only the matrices with values in this block
                    numel = entry.shape[-2] * entry.shape[-1]
                    end = -(-(start + span.numel) // numel)  # rounded up
                    averages = averages[start // numel : end]
                self._rule.direct(averages)

        self._device.run(COMPUTE, f"direct {tile.name}", work, [], [sums])

    def _average(
        self, tile: Tile, sums: Buffer, settings: Mapping[str, Settings], scale: float
    ) -> None:
        """Average a tile's gradient into its momentum on the device; send the momentum back."""
        device, checks = self._device, self._checks
        at_rest = self._state(tile)
        lane = self._fetched.pop(tile.index, None)
        if lane is None:
            state = at_rest
            self._release(tile, COMPUTE)
        else:
            device.wait(COMPUTE, lane.ready, "directions' state arrived")
            state = lane.buffer.piece(0, len(at_rest.data))
        own_spans, (start, _) = self._own_spans[tile.index], self._range(tile)

        def work() -> None:
            proceed = self._proceed.data[0].isfinite()
            with checks.checking_change(tile, state, start) if own_spans else nullcontext():
                for entry, span in own_spans:
                    gradient = sums.data[span.at : span.at + span.numel].mul_(scale)
                    momentum = state.data[span.start - start : span.stop - start]
                    self._rule.average(gradient, momentum, settings[entry.name], proceed)

        writes = [sums, state, checks.flag]
        device.run(COMPUTE, f"average {tile.name}", work, [self._proceed], writes)
        if lane is None:
            return
        device.wait(COPY_OUT, device.record(COMPUTE), "directions' state ready")
        self._release(tile, COPY_OUT)
        device.copy(COPY_OUT, at_rest, state)
        lane.free = device.record(COPY_OUT)

    def _release(self, tile: Tile, stream: str) -> None:
        """Let `stream`, which will overwrite a state, wait for saves that still read the tile."""
        has_readers = bool(tile.readers)
        give_way(self._device, tile, tile.rests.updates)
        if has_readers and tile.rests.updates != stream:
            event = self._device.record(tile.rests.updates)
            self._device.wait(stream, event, "directions' state released")


_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this

_INTACT = (
    "stopped before the update, weights and optimizer state are those of the last step; lower the "
    "learning rate or check the data"
)
_DAMAGED = (
    "without clipping (with Muon: in layers) updates do not wait for it, so weights and optimizer "
    "state are damaged; go back to the last checkpoint, and clip (max_grad_norm) or lower the "
    "learning rate"
)

_REL_TOL = 0.05  # between two computations of one step; atomic additions differ far less


class _Run(NamedTuple):
    """Elements `start` to `stop` (excluded) of a tile that one update treats alike."""

    group: dict[str, Any]
    start: int
    stop: int
    states: Sequence[Plane]
    version: int | None  # the number of updates, this one included; None: no update
    scale: float  # the clipping factor; 1 where the gradient is a direction, already clipped
    # `start + moved` is the first element's number in the layout of one rank, which seeds rounding
    moved: int = 0


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        loss: the step's loss before the update: the mean cross entropy of labels, or another loss.
        grad_norm: global 2-norm of the gradient, before clipping.
        tokens: positions in the rows of all ranks, padding included.
        seconds: from the call to the end of the backward (the update may still be running).
        measures: further numbers that the loss measures (rewards of replies), by name.
        experts: the loads of a mixture's experts: `expert_load_max` and `experts_starved`.
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, float] = field(default_factory=dict)


class Update:
    """Starts each tile's update as early as possible.

    Without clipping an update starts when its gradient has landed. With clipping all updates start
    after the backward, when the norm is known, and run in visiting order under the next forward.
    """

    def __init__(
        self,
        shared: Shared,
        optimizer: StreamedOptimizer,
        max_grad_norm: float | None,
        disk: DiskStaging,
    ) -> None:
        device, tiles = shared.device, shared.tiles
        self._device, self._optimizer, self._threads = device, optimizer, shared.threads
        self.max_grad_norm, self.disk = max_grad_norm, disk
        self._collectives, self._checks = shared.collectives, shared.checks
        self.norm_limit = math.inf  # a step whose norm is above it is refused
        self.expected: tuple[float, float] | None = None  # this step's loss and norm, if run before
        self._pending: list[tuple[Tile, Lane]] = []  # waiting tiles with their host gradients
        self._started: list[Tile] = []  # tiles whose update has started in the current step
        self._torn = False  # True: an earlier step was aborted after some updates had begun
        self._losses: list[Tensor] = []  # shares of the step's loss
        self._loss_checked: Any = None  # event
        self._refused = False  # True: the loss is not finite, skip updates; set on the host stream
        # A step's report: the loss, the squared norms (`Sink.squares`), the flag of checksums.
        memory = device.empty("report", len(tiles) + 3, torch.float32).data
        self._loss, self._norms = Buffer("loss", memory[:1]), Buffer("norms", memory[1:])
        self._report = Buffer("report", memory, (self._loss, self._norms))
        self._landed = device.host("landed report", len(tiles) + 3, torch.float32, pinned=True)
        self.directions = Directions(shared, optimizer.rule, self._loss)
        self._unclipped = {t.index for t in tiles if optimizer.rule.directs(t.layout)}
        self.deferred = max_grad_norm is not None and not self._unclipped  # all wait for the norm

    def waits(self, tile: Tile) -> bool:
        """True if a tile's update waits for the global norm."""
        return self.max_grad_norm is not None and tile.index not in self._unclipped

    @property
    def torn(self) -> bool:
        """True if a step was aborted after some updates had begun: tiles are of different steps."""
        return self._torn or bool(self._started)

    def begin(self) -> None:
        """Begin a step; drop pending updates of an aborted one."""
        self._torn = self.torn
        self._checks.begin()
        self._pending, self._started = [], []
        # Copies, since a later change of the groups' settings is meant for the next step.
        self._group_of = self._optimizer.group_of()
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        self._settings = {name: self._groups[index] for name, index in self._group_of.items()}

    def ready(self, tile: Tile, host_grad: Lane) -> None:
        """Take a tile's gradient, which is in `host_grad` after the event `host_grad.ready`."""
        if self.waits(tile) or tile.rests.updates == COMPUTE:
            self._pending.append((tile, host_grad))
            if not self.directions.has_any(tile):  # else directions will replace the gradient
                self._checks.sum_gradient(tile, host_grad.buffer, host_grad.ready)
        else:
            self._start(tile, host_grad, 1.0)

    def guard(self, losses: list[Tensor]) -> None:
        """Sum the loss over ranks; if it is not finite, skip updates that start before the norm."""
        loss, device = self._loss, self._device
        self._losses = losses

        def collect() -> None:
            loss.data[0] = torch.stack(losses).sum()

        device.run(COMPUTE, "note loss", collect, writes=[loss])
        ready = self._collectives.all_reduce(loss, "loss")
        if self.deferred:
            return
        device.wait(COPY_OUT, ready, "loss ready")
        device.copy(COPY_OUT, self._landed, loss, 1)
        device.wait(UPDATE, device.record(COPY_OUT), "loss landed")

        def check() -> None:
            self._refused = not math.isfinite(self._landed.data[0])

        device.run(UPDATE, "check loss", check, [self._landed])
        self._loss_checked = device.record(UPDATE)

    def finish(self, sink: Sink) -> tuple[float, float]:
        """Wait for the end of the backward; then start the updates that wait for the norm.

        Returns the loss and the gradient norm.

        Raises StepRefused: loss or norm is not finite, or the norm is above `norm_limit`; unless
        the norm is bad and gradients are not clipped, no weight has been changed. RunFailed: a host
        thread failed, or a bit has changed.
        """
        device = self._device
        squares, flag = sink.squares, self._checks.flag
        self._checks.compare_on_device([(tile, grad.buffer) for tile, grad in self._pending])
        collect = partial(torch.cat, (squares.data, flag.data), out=self._norms.data)
        device.run(COMPUTE, "note norm", collect, [squares, flag], [self._norms])
        ready = self._collectives.all_reduce(self._norms, "norm")
        device.wait(COPY_OUT, ready, "report ready")
        device.wait(COPY_OUT, self._loss_checked, "loss checked")
        device.copy(COPY_OUT, self._landed, self._report)
        device.synchronize(device.record(COPY_OUT), "report landed")
        loss, *squares_of_tiles, differing = device.read(self._landed)
        self._checks.report(differing, self._collectives.ranks)
        # The sum over ranks has each tile once for each host.
        total = sum(squares_of_tiles) / self._collectives.ranks.hosts
        norm = math.sqrt(total) if total >= 0 else math.nan
        self._check((loss, norm))
        # The backward ends with the tiles that the next forward needs first: tables, layer 0, ...
        for tile, host_grad in reversed(self._pending):
            limit = self.max_grad_norm if self.waits(tile) else None
            scale = 1.0 if limit is None else min(1.0, limit / (norm + _CLIP_EPS))
            if self.waits(tile) and self.directions.has_any(tile):
                self.directions.fetch_state(tile)
                accumulator = sink.recall(tile, host_grad)
                self.directions.replace_gradients(tile, accumulator.sums, self._settings, scale)
                sink.send(accumulator, host_grad)
            self._start(tile, host_grad, scale)
        return loss, norm

    def end(self) -> None:
        """End a step, after it was counted: an abort from now on leaves no torn step."""
        self._started = []

    def _check(self, measured: tuple[float, float]) -> None:
        """Raise an error if a step's loss and gradient norm forbid its updates; see `finish`."""
        loss, norm = measured
        if self.expected is not None and not all(map(_same_result, measured, self.expected)):
            pairs = measured, self.expected
            new, old = (" and ".join(f"{number:.6g}" for number in pair) for pair in pairs)
            raise RunFailed(
                f"loss and gradient norm are {new}, and were {old} when the same step was "
                "computed from the same state before: a fault of the hardware. No weight has been "
                "changed; test this machine's memory and GPU, and go on from the last checkpoint"
            )
        norm_is_finite = math.isfinite(norm)
        if not math.isfinite(loss):
            for tile in self._started:  # `_apply` has skipped these updates
                tile.version -= 1
                tile.skipped.subtract(tile.idle)
            self._started = []
            self._checks.compare_all()  # raises if a changed bit may be the cause
            not_finite = [i for i, share in enumerate(self._losses) if not math.isfinite(share)]
            ranks = self._collectives.ranks
            of_rank = "" if ranks.size == 1 else f" of rank {ranks.rank}"
            problem = f"the loss is {loss} (micro-batches {not_finite}{of_rank})"
            raise StepRefused(f"{problem}: {_INTACT}", intact=True, measured=measured)
        if norm_is_finite and norm <= self.norm_limit:
            return
        if not norm_is_finite:
            self._checks.compare_all()
        above = f", above {self.norm_limit:.4g}" if norm_is_finite else ""
        damage = _INTACT if self.deferred else _DAMAGED
        problem = f"the gradient norm is {norm:.4g}{above}"
        raise StepRefused(f"{problem}: {damage}", intact=self.deferred, measured=measured)

    def _start(self, tile: Tile, host_grad: Lane, scale: float) -> None:
        """Put a tile's update on its stream, behind its gradient's arrival and a save's reads."""
        stream = tile.rests.updates
        if tile.rests.gradient is not Tier.DEVICE:
            self._device.wait(stream, host_grad.ready, "gradient landed")
        give_way(self._device, tile, stream)
        tile.version += 1
        tile.skipped.update(tile.idle)
        self._started.append(tile)
        own_runs = [  # with `start` and `stop` counted in this rank's planes
            run._replace(start=span.start, stop=span.stop, moved=span.at - span.start - span.moved)
            for run in self._runs(tile, scale)
            for span in tile.spans_of(run.start, run.stop)
        ]
        sums = self._checks.update_sums(tile, host_grad.buffer)
        name = Name(Kind.UPDATE, f"update {tile.name}")
        for first, last, part in self.disk.visit(tile):  # in parts, if planes rest on a disk
            runs = [
                run._replace(start=max(run.start, first), stop=min(run.stop, last))
                for run in own_runs
                if first < run.stop and run.start < last
            ]
            work = partial(self._apply, part, first, host_grad, runs, sums)
            written = [buffer for plane, buffer in part.planes.items() if not plane.on_device]
            self._device.run(stream, name, work, [host_grad.buffer], written)
        if tile.layout.copies and tile.remainder is not None:
            # The copies of masters that layers compute with in fp32; the masters may be on a disk.
            on_disk = Tier.DISK in (tile.rests.weights, tile.rests.remainder)
            if on_disk:
                self._device.wait(stream, tile.written, "disk version to copy")
            copying, halves = f"copy masters of {tile.name}", [tile.weights, tile.remainder]
            work = partial(tile.copy_masters, self._threads)
            self._device.run(stream, copying, work, halves, [tile.weights])
            if on_disk:
                tile.written = self._device.record(stream)
        if sums is not None:

            def compare() -> None:
                if not self._refused:
                    self._checks.updated(tile, sums)

            on_device = [b for p, b in tile.planes.items() if tile.rests.tier(p) is Tier.DEVICE]
            self._device.run(stream, f"compare {tile.name}", compare, on_device)
        tile.updated = host_grad.free = self._device.record(stream)

    def _runs(self, tile: Tile, scale: float) -> Iterator[_Run]:
        """Split a tile into runs of one group and version; if the rule needs that, by parameter."""
        states = [plane for plane in tile.states if not plane.on_device]
        versions = {
            entry.name: None if entry.name in tile.idle else tile.version - tile.skipped[entry.name]
            for entry in tile.layout.trainable
        }
        if not self._optimizer.rule.needs_matrices:
            marks = {name: (self._group_of[name], version) for name, version in versions.items()}
            for (index, version), start, stop in tile.layout.runs(marks):
                yield _Run(self._groups[index], start, stop, states, version, scale)
            return
        for entry in tile.layout.trainable:
            with_entry = [plane for plane in states if plane.has(entry)]
            group = self._groups[self._group_of[entry.name]] | {"shape": entry.shape}
            clipping = 1.0 if self._optimizer.rule.directed(entry) else scale
            stop = entry.offset + entry.numel
            yield _Run(group, entry.offset, stop, with_entry, versions[entry.name], clipping)

    def expect(self, tile: Tile) -> None:
        """Prepare for a tile's gradient, which will soon be complete on the device."""
        if not self.waits(tile):
            self.directions.fetch_state(tile)

    def direct(self, tile: Tile, sums: Buffer) -> None:
        """Replace the complete gradient in `sums` by directions, if the rule has any."""
        if not self.waits(tile):
            self.directions.replace_gradients(tile, sums, self._settings)

    def _apply(
        self, tile: Tile, first: int, host_grad: Lane, runs: Sequence[_Run], sums: UpdateSums | None
    ) -> None:
        """Update `runs` of `tile`, whose planes begin with this rank's element `first`."""
        if self._refused:
            return
        gradient = host_grad.buffer.data
        by_kind = {plane.kind: plane for plane in tile.planes}
        weights = by_kind[PlaneKind.WEIGHTS]
        remainder = by_kind.get(PlaneKind.REMAINDER)
        for run in runs:
            in_part = slice(run.start - first, run.stop - first)
            part = TileRange(
                tile.weights.data[in_part],
                None if tile.remainder is None else tile.remainder.data[in_part],
                [tile.states[p].data[p.place(in_part.start, in_part.stop)] for p in run.states],
                # fp32 sums that stay on the device are rounded like gradients sent to the host.
                gradient[run.start : run.stop].to(tile.weights.data.dtype),
            )
            seed_offset = tile.index * MOST_ELEMENTS + run.start + run.moved
            options = UpdateOptions(seed_offset, run.version or 0, run.scale, self._threads)
            rule = None if run.version is None else self._optimizer.rule
            if sums is not None:
                planes = [weights, remainder, *run.states]
                sums.apply(rule, part, planes, run.start, run.group, options)
            elif rule is not None:
                rule.update(part, run.group, options)


def _same_result(number: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return not math.isfinite(number)
    return math.isclose(number, expected, rel_tol=_REL_TOL)
