"""Embedding tables stay on the host: only the rows of a step's tokens cross the bus.

Forward: a host thread gathers the distinct rows, which are copied in. Backward: the rows are copied
in again unless they were kept; their gradients, summed in fp32 on the device, are copied out and
scattered into the host gradient. The host gradient of a tied table already holds the head's dense
gradient; its rows come in, are added to, and go back, so that the norm is that of the sum. Of
several ranks each keeps a range of a table's rows.

Legend: U distinct tokens of the step, V rows of a table, D width of a table.
"""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.device import Buffer
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, ROWS, Memory, Name
from megatrain.engine.shared import Shared
from megatrain.engine.sink import NOWHERE, ScratchArena, Sink, TableRows
from megatrain.errors import InputError
from megatrain.model.micro_batch import Batch
from megatrain.store.store import Lane, Tile, in_place
from megatrain.tile import Entry


class _Table(TableRows):
    """An embedding table, of which this rank keeps some or all rows, and buffers for a step's rows.

    Attributes:
        tied: True if the head streams the table as well.
        rows_each: rows that each rank keeps (the last ranks may have fewer).
        staging: pinned host memory for rows on their way; `free`: event after which `staging` may
            be written again.
    """

    def __init__(self, tile: Tile, entry: Entry, *, tied: bool) -> None:
        super().__init__(entry.name, trained=entry.group is not None)
        self.tile, self.entry, self.tied = tile, entry, tied
        self.staging, self.free = NOWHERE, None
        self.width = prod(entry.shape[1:])
        ranks, self.rows_each = tile.layout.ranks, entry.shape[0]
        if ranks == 1:
            return
        # Ranks get equal blocks of a part: whole rows of the table only if it begins the part.
        stop_of_part = dict(tile.layout.parts)  # by the part's start
        if entry.offset not in stop_of_part:
            raise InputError(
                f"several ranks cannot share the rows of {entry.name!r}, which is not first in its "
                "tile; put it into the optimizer's first group with weight decay"
            )
        self.rows_each = (stop_of_part[entry.offset] - entry.offset) // ranks // self.width

    def rows_of(self, plane: Buffer) -> Tensor:
        """The table's rows in this rank's part of a plane, `[rows, D]`."""
        return plane.data[self.tile.place(self.entry)[0]].view(-1, self.width)

    def local_ids(self, batch: Batch) -> Tensor:
        """Numbers of this rank's rows that a step needs, as `rows_of` counts them."""
        return batch.unique_U[batch.own] - self.tile.place(self.entry)[1].start // self.width

    def as_rows(self, buffer: Buffer, unique_U: Tensor) -> Tensor:
        """The beginning of `rows`, `sums` or `staging` as `[U, D]`.

        Work for a host thread takes this view when it is put on a stream: before it runs, the next
        step may have replaced the buffer by a larger one.
        """
        return buffer.data[: len(unique_U) * self.width].view(-1, self.width)

    def own_rows(self, buffer: Buffer, batch: Batch) -> Buffer:
        """The part of `rows` or `sums` that holds this rank's rows."""
        start, stop, _ = batch.own.indices(len(batch.unique_U))
        return buffer.piece(start * self.width, stop * self.width)


class Embedding:
    """Gathers rows for the prologue and takes their gradients back."""

    def __init__(self, shared: Shared, sink: Sink | None) -> None:
        self._device, self._threads, self._dtype = shared.device, shared.threads, shared.dtype
        self.sink: Any = sink  # None where nothing is trained
        self._keep_rows = shared.placement.keep_rows
        self._arena = (
            ScratchArena(shared.device, 0, 0, shared.dtype) if sink is None else sink.arena
        )
        self._collectives = shared.collectives
        self._tables = [
            _Table(tile, tile.layout.by_name[name], tied=tile is shared.head)
            for name in shared.program.spec.gathered
            for tile in shared.tiles
            if name in tile.layout.by_name
        ]
        # With several ranks there is only one table.
        self.rows_each = max((table.rows_each for table in self._tables), default=1)
        self.trained = [table.name for table in self._tables if table.trained]
        self._capacity = 0  # the most rows of a step for which the buffers have room
        if sink is not None:
            sink.with_rows = {table.tile.index for table in self._tables if table.trained}

    @property
    def host_bytes(self) -> int:
        return sum(table.staging.data.nbytes for table in self._tables)

    def fetch(self, batch: Batch) -> None:
        """Start copying a step's rows to the device, and let every micro-batch refer to them."""
        self._lay_out(len(batch.unique_U))
        for table in self._tables:
            rows = table.entry.shape[0]
            token = int(batch.unique_U.max())
            if token >= rows:
                raise InputError(
                    f"{table.name} has {rows} rows, and the batch has token {token}: the "
                    "model's forward looks rows up by other numbers than its tokens, which is not "
                    "supported"
                )
            if not table.tile.rests.local:
                self._gather(table, table.tile.weights, table.tile.updated, batch)
            self._bring(table, batch)
            rows_UD = table.as_rows(table.rows, batch.unique_U)
            for micro in batch.micro:
                micro.rows.tables[table.name] = rows_UD

    def reserve(self, num_tokens: int) -> None:
        """Allocate buffers for the most rows that a step of `num_tokens` tokens can need."""
        self._lay_out(min(num_tokens, max((t.entry.shape[0] for t in self._tables), default=0)))

    def _lay_out(self, num_rows: int) -> None:
        """Allocate buffers for `num_rows` rows of each table; they grow geometrically."""
        capacity = self._capacity
        grows = num_rows > capacity
        if grows:
            capacity = max(num_rows, capacity * 3 // 2)
        for table in self._tables:
            table.numel = min(capacity, table.rows_each * table.tile.layout.ranks) * table.width
        self._arena.lay_out(self._tables, keep_rows=self._keep_rows)
        for table in self._tables:
            if grows and not table.tile.rests.local:
                if table.staging is not NOWHERE:
                    self._device.free(table.staging)
                    table.staging = NOWHERE
                name = Name(Memory.ROWS, f"{table.name} staged rows")
                table.staging = self._device.host(name, table.numel, self._dtype, pinned=True)
                table.free = None
        self._capacity = capacity  # set last: if memory ran out, the next step allocates again

    def _bring(self, table: _Table, batch: Batch) -> None:
        """Copy a step's rows into `table.rows`: from the staging buffer, or from the plane."""
        stream = COPY_IN
        if table.tile.rests.local:
            if table.tile.rests.shared:
                self._device.wait(COMPUTE, table.tile.updated, "rows due")
            self._gather_in_place(table, table.tile.weights, batch)
            stream = COMPUTE
        else:
            self._copy_staged(table, batch)
        arrived = table.rows.piece(0, len(batch.unique_U) * table.width)
        ready = self._collectives.all_gather([arrived], table.name, stream)
        self._device.wait(COMPUTE, ready, "rows arrived")

    def _gather_in_place(self, table: _Table, plane: Buffer, batch: Batch) -> None:
        """Copy a step's rows from a plane that the device reads in place."""
        plane = in_place(self._device, table.tile, plane)
        out = table.own_rows(table.rows, batch)

        def gather() -> None:
            ids_U = table.local_ids(batch).to(out.data.device)
            rows_UD = out.data.view(-1, table.width)
            torch.index_select(table.rows_of(plane), 0, ids_U, out=rows_UD)

        self._device.run(COMPUTE, "gather", gather, [plane], [table.rows])

    @property
    def rows(self) -> list[Buffer]:
        """The buffers that the prologue reads."""
        return [table.rows for table in self._tables]

    @property
    def sums(self) -> list[Buffer]:
        """The buffers that the prologue's backward writes."""
        return [table.sums for table in self._tables]

    def prepare_gradients(self, batch: Batch) -> None:
        """Put the rows on the device again; clear the sums of their gradients and squares."""
        for table in self._tables:
            if not self._keep_rows:
                self._bring(table, batch)
            if not table.trained:
                continue

            def clear(sums: Tensor = table.sums.data) -> None:
                sums.zero_()
                self.sink.squares.data[-1] = 0

            self._device.run(COMPUTE, "clear rows", clear, writes=[table.sums, self.sink.squares])

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Add one micro-batch's row gradients `[U, D]`, by table name (inside compute work)."""
        for table in self._tables:
            if table.name in gradients:
                gradient = gradients[table.name].reshape(-1)
                table.sums.data[: gradient.numel()].add_(gradient)

    def send_gradients(self, batch: Batch) -> None:
        """Add the row gradients to their tiles' gradients, on the host or the device."""
        host_grads: dict[int, tuple[Tile, Lane]] = {}  # by the tile's index
        for table in self._tables:
            if not table.trained:
                continue
            tile = table.tile
            sums = table.sums.piece(0, len(batch.unique_U) * table.width)
            self._collectives.reduce_scatter(sums, table.name)
            if table.tied:
                host_grad = self.sink.landed[tile.index]
                if tile.rests.local:
                    self._gather_in_place(table, host_grad.buffer, batch)
                else:
                    self._gather(table, host_grad.buffer, host_grad.ready, batch)
                    self._copy_staged(table, batch)
                    self._device.wait(COMPUTE, table.free, "rows arrived")
            elif tile.index in host_grads:  # another table is in the same tile
                _, host_grad = host_grads[tile.index]
            else:
                host_grad = self._claim_cleared(table)
            self._add_up(table, batch)
            self._scatter(table, host_grad, batch)
            host_grads[tile.index] = tile, host_grad
        for tile, host_grad in host_grads.values():
            self.sink.updates.ready(tile, host_grad)

    def _gather(self, table: _Table, plane: Buffer, event: Any, batch: Batch) -> None:
        """Gather a step's rows of a host plane into the staging buffer, after `event`."""
        ids_U = table.local_ids(batch)
        out_UD = table.as_rows(table.staging, ids_U)
        work = partial(
            kernels.gather_rows, table.rows_of(plane), ids_U, out_UD, threads=self._threads
        )
        self._device.wait(ROWS, event, "rows due")
        self._device.wait(ROWS, table.free, "staging free")
        self._device.run(ROWS, f"gather {table.name}", work, [plane], [table.staging])

    def _copy_staged(self, table: _Table, batch: Batch) -> None:
        device, rows = self._device, table.own_rows(table.rows, batch)
        device.wait(COPY_IN, device.record(ROWS), "rows gathered")
        device.wait(COPY_IN, device.record(COMPUTE), "row room free")
        device.copy(COPY_IN, rows, table.staging, len(rows.data))
        table.free = device.record(COPY_IN)

    def _claim_cleared(self, table: _Table) -> Lane:
        """Claim the host gradient of the table's tile, and set it to zero."""
        tile = table.tile
        stream = COMPUTE if tile.rests.local else ROWS
        host_grad: Lane = self.sink.claim(tile, stream)
        plane = in_place(self._device, tile, host_grad.buffer)

        def clear() -> None:
            values = plane.data[: tile.own_numel]
            if values.is_cpu:
                kernels.fill_zero(values, threads=self._threads)
            else:
                values.zero_()

        self._device.run(stream, f"clear {plane.name}", clear, writes=[plane])
        return host_grad

    def _add_up(self, table: _Table, batch: Batch) -> None:
        """Round the gradients of a step's rows into `rows`; add their squared norm to the step's.

        `rows` hold a tied table's gradient by the head (`dense`). The sink has already added its
        squared norm, so the rest is added here: `|sums + dense|^2 - |dense|^2`.
        """
        rows = table.own_rows(table.rows, batch).data
        sums = table.own_rows(table.sums, batch).data
        squares = self.sink.squares.data

        def work() -> None:
            if table.tied:
                dense = rows.float()  # the head's gradient, which the norm already has
                squares[-1] += torch.dot(sums, sums + 2 * dense)
                sums.add_(dense)
            else:
                squares[-1] += torch.linalg.vector_norm(sums) ** 2
            rows.copy_(sums)

        writes = [table.rows, table.sums, self.sink.squares]
        self._device.run(COMPUTE, "add up rows", work, writes=writes)

    def _scatter(self, table: _Table, host_grad: Lane, batch: Batch) -> None:
        """Write `table.rows`, now rounded gradients, into `host_grad`; set its `ready` event."""
        device = self._device
        name = f"scatter {table.name}"
        ids_U = table.local_ids(batch)
        gradients = table.own_rows(table.rows, batch)
        if table.tile.rests.local:
            tile_gradient = in_place(device, table.tile, host_grad.buffer)

            def put() -> None:
                rows_UD = gradients.data.view(-1, table.width)
                table.rows_of(tile_gradient).index_copy_(0, ids_U.to(rows_UD.device), rows_UD)

            device.run(COMPUTE, name, put, [table.rows], [tile_gradient])
            host_grad.ready = device.record(COMPUTE)
            return
        plane = table.rows_of(host_grad.buffer)
        rows_UD = table.as_rows(table.staging, ids_U)
        work = partial(kernels.scatter_rows, plane, ids_U, rows_UD, threads=self._threads)
        device.wait(COPY_OUT, device.record(COMPUTE), "row gradients ready")
        device.copy(COPY_OUT, table.staging, gradients, rows_UD.numel())
        device.wait(ROWS, device.record(COPY_OUT), "row gradients landed")
        device.run(ROWS, name, work, [table.staging], [host_grad.buffer])
        host_grad.ready = device.record(ROWS)
