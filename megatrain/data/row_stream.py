"""Rows of sources that are too large to keep tokenised: made on demand.

Documents are read in order and gathered in blocks of `block_tokens`. A block is shuffled and packed
as a data set of its own, the next one is made meanwhile. The order of rows is a function of the
seed; it mixes what is near in the sources. A run goes on where a block starts: what comes before is
read again, but not tokenised.
"""

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatrain.base.shipped import shipped
from megatrain.data.dataset import Layout, MicroBatch, PackedDataset, choose
from megatrain.data.encoders import Document, Encoder
from megatrain.data.examples import BEFORE_ALL, Examples
from megatrain.data.row_packing import Ints, shuffled
from megatrain.data.token_store import memory_store
from megatrain.errors import InputError

_log = logging.getLogger("megatrain.data")

# Ending of an error: the only cause of changed rows that no user intends.
DATED = f" (a chat template that writes the date: {shipped('docs/reliability.md')})"


class BlockStart(NamedTuple):
    """The start of a block: its first row, and the last document before it in an epoch.

    digest: of the block's tokens; empty where they are not known yet.
    """

    row: int
    epoch: int
    source: int
    line: int
    digest: str = ""


@dataclass(frozen=True)
class Block:
    """Some rows of a stream. order: [rows] numbers of the data's rows. last: the last document."""

    start: BlockStart
    data: PackedDataset
    order: Ints
    last: tuple[int, int]

    @property
    def end(self) -> int:
        """The first row of the next block."""
        return self.start.row + len(self.data)

    def row(self, row: int) -> int:
        """The number in the data of a row of the stream."""
        return int(self.order[row - self.start.row])


class RowStream:
    """The endless rows of some sources, by their number; any thread may call it.

    Args: `layout`: of rows, for any kind of source; `block_tokens`: tokens shuffled together.

    Attributes:
        fingerprint: of sources and settings.

    Raises InputError: the data cannot be used.
    """

    def __init__(
        self,
        examples: Callable[[tuple[int, int]], Examples],
        encoder: Encoder,
        layout: Layout,
        seed: int,
        block_tokens: int,
        identity: Sequence[Any],
    ) -> None:
        self._examples, self._encoder, self._layout = examples, encoder, layout
        self._seed, self._block_tokens = seed, block_tokens
        _, *of_layout = vars(layout).values()  # all but its kind
        parts = json.dumps([*identity, *of_layout, seed, block_tokens])
        self.fingerprint = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "megatrain-stream")
        self._closed = False
        self._begin(BlockStart(0, 0, *BEFORE_ALL))

    @property
    def packing(self) -> bool:
        """True if rows may hold several documents (and all have the same length)."""
        return self._layout.packing

    @property
    def kind(self) -> str:
        """The kind of documents: text or chat."""
        return self.block.kind

    @property
    def block(self) -> PackedDataset:
        """The oldest block in memory: at first, the first one."""
        return self._blocks[0].data

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch of rows as `Layout.batch` makes it."""
        blocks = [(self._block_of(row), row) for row in rows]
        return self._layout.batch(
            [list(block.data.pieces(block.row(row))) for block, row in blocks]
        )

    def row_length(self, row: int) -> int:
        """Tokens in a row, padding not counted."""
        block = self._block_of(row)
        return int(block.data.row_lengths[block.row(row)])

    def describe(self, row: int) -> str:
        """The origin of a row's tokens."""
        block = self._block_of(row)
        return block.data.describe(block.row(row))

    def epoch(self, row: int) -> int:
        """How often all sources have been read to their end before this row."""
        return self.start(row).epoch

    def start(self, row: int) -> BlockStart:
        """The start of the block with this row; at a block's end, the next block's."""
        with self._lock:
            for block in self._blocks:
                if row == block.end:  # the next one may not be ready yet
                    return BlockStart(row, block.start.epoch, *block.last)
                if block.start.row <= row < block.end:
                    return block.start
        raise ValueError(f"row {row} is in no block that is kept")

    def go_to(self, start: BlockStart) -> None:
        """Go to a block's start, and keep the blocks from there on.

        Raises InputError: the block's content has changed.
        """
        with self._lock:
            self._end()
            self._begin(start)
            digest = self._blocks[0].start.digest
        if start.digest not in ("", digest):
            raise InputError(
                f"the data is not that of the saved run: restore it, or start a new run{DATED}"
            )

    def forget(self, row: int) -> None:
        """Free the blocks before this row."""
        with self._lock:
            while self._blocks[0].end <= row and len(self._blocks) > 1:
                self._blocks.popleft()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._end()
            self._pool.shutdown()

    def _begin(self, start: BlockStart) -> None:
        self._closed = False
        self._made = self._blocks_from(start)
        self._blocks = deque([next(self._made)])
        self._next: Future[Block] | None = None  # made when the first row is taken

    def _end(self) -> None:
        self._closed = True
        if self._next is not None and not self._next.cancel():
            self._next.exception()  # the thread stops after its current document

    def _block_of(self, row: int) -> Block:
        with self._lock:
            self._next = self._next or self._pool.submit(next, self._made)
            while self._blocks[-1].end <= row:
                self._blocks.append(self._next.result())
                self._next = self._pool.submit(next, self._made)
            return next(block for block in reversed(self._blocks) if block.start.row <= row)

    def _blocks_from(self, start: BlockStart) -> Iterator[Block]:
        row, epoch, after = start.row, start.epoch, (start.source, start.line)
        while not self._closed:
            examples = self._examples(after)
            num_bad = 0
            for documents in self._parts(examples):
                names = [source.name for source in examples.sources]
                store = memory_store(documents, names, examples.notes)
                layout = replace(self._layout, kind=store.notes["kind"])
                learnt = choose(store, layout, self._seed)
                data = PackedDataset(store, learnt, layout, f"seed {self._seed}")
                order = shuffled(len(data), 4, self._seed, row)
                last = (documents[-1].source, documents[-1].line)
                if (bad := examples.notes["num_bad"]) > num_bad:
                    num_bad = bad
                    _log.warning("left out %d bad rows so far", bad)
                block = Block(BlockStart(row, epoch, *after, store.digest), data, order, last)
                yield block
                row, after = block.end, last
            if after == BEFORE_ALL:
                raise InputError(f"{examples.sources[0].name}: no row of the data can be used")
            epoch, after = epoch + 1, BEFORE_ALL

    def _parts(self, examples: Examples) -> Iterator[list[Document]]:
        """All documents in blocks, each of which ends at the end of a row of the source."""
        part: list[Document] = []
        count = 0
        for document in self._encoder.documents(examples):
            if self._closed:
                return
            ended = not part or (document.source, document.line) != part[-1][:2]
            if count >= self._block_tokens and ended:
                yield part
                part, count = [], 0
            part.append(document)
            count += len(document.ids)
        if part:
            yield part
