"""The works of a model's parts in rows of one length.

A few numbers of rows are measured on the model's own code (forecast/measure.py), and kept
(forecast/notes.py); works of other numbers are computed from these.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from megatrain.base.units import on_line
from megatrain.forecast.notes import Notes, Once, Value
from megatrain.forecast.op_counter import LayerWork, MediaWork, Prologue, Shape, Work
from megatrain.forecast.workload import Workload
from megatrain.loss import Loss
from megatrain.model.capture import Ref, Rows
from megatrain.model.media import as_computed
from megatrain.model.micro_batch import Batch, MicroBatch
from megatrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from megatrain.forecast.measure import Measurer

_CHUNKS_RUN = 3  # of a head: so many chunks' logits take more memory than all tokens' hidden states
_ROWS = 2, 3  # measured; 1 is not on their line, as code copies several rows where it views one


@dataclass
class Group(MicroBatch):
    """Micro-batches of the same work that a forecast follows as one, each layer after the other.

    With a few groups a forecast is within 1 % of that with every micro-batch.
    """

    count: int = 1


def grouped(micro: MicroBatch) -> int:
    """How many micro-batches this one stands for."""
    return micro.count if isinstance(micro, Group) else 1


def groups(rows: int, micro_batch: int, cap: int | None, passes: int = 1) -> list[tuple[int, int]]:
    """The groups of a step: of each the number of micro-batches, and the rows of one.

    Args: `cap`: groups, at most, where no pass needs more; None: one for each micro-batch.
    """
    num_full, remaining_rows = divmod(rows, micro_batch)
    last = [(1, remaining_rows)] if remaining_rows else []
    num_micro = num_full + len(last)
    passes = min(passes, num_micro)
    ends = [num_micro * number // passes for number in range(passes + 1)]
    sizes: list[tuple[int, int]] = []
    for start, stop in pairwise(ends):
        num_in_pass = min(stop, num_full) - start
        num_groups = num_in_pass
        if cap is not None:
            num_groups = min(num_in_pass, max(1, (cap - len(last)) // passes))
        for i in range(num_groups):  # the first groups have one more
            sizes.append((num_in_pass // num_groups + (i < num_in_pass % num_groups), micro_batch))
    return [*sizes, *last]


class Profile(Once):
    """The works of a model's parts, each measured when it is first asked for."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        chunk_tokens: int | None = None,
        notes: Notes | None = None,
        owners: int = 1,
    ) -> None:
        """Args: with `chunk_tokens`, only the parts that run in tiles of tokens are compiled.

        `owners`: ranks that own the experts.
        """
        super().__init__()
        self.spec, self.dtype, self.tokens = spec, workload.dtype, workload.sequence_length
        self.compiled, self._chunk_tokens = workload.compile, chunk_tokens
        self._workload = workload
        self.media, self._float8 = workload.media, workload.precision == "fp8"
        self._notes = notes or Notes(lambda: spec)
        digest = self.media and self.media.digest
        ways_to_run = self.compiled, chunk_tokens, owners, workload.sequence_ranks
        self._key = self.dtype, self.tokens, *ways_to_run, digest
        self._owners = owners
        kinds = [id(layer.kind) for layer in spec.layers]
        self._first_visit = [kinds.index(kind) for kind in kinds]  # the first layer of its kind

    @cached_property
    def _measurer(self) -> "Measurer":
        from megatrain.forecast.measure import Measurer

        return Measurer(self._notes.opened(), self._workload, self._chunk_tokens, self._owners)

    def distinct(self, rows: int) -> Tensor:
        """The distinct tokens of a step of random tokens, `[U]`: as many as on average."""

        def draw() -> Tensor:
            config = self.spec.capture.model.config.get_text_config(decoder=True)
            generator = torch.Generator().manual_seed(0)
            ids_BT = torch.randint(config.vocab_size, (rows, self.tokens), generator=generator)
            constants = list(self.spec.constants)
            seen_V = torch.zeros(max(config.vocab_size, *constants, 0) + 1, dtype=torch.bool)
            seen_V[ids_BT.flatten()] = seen_V[constants] = True  # far quicker than `unique`
            return seen_V.nonzero().flatten()

        return self.once(("distinct", rows), draw)

    def batch(self, rows: int, micro_batch: int, cap: int | None = None, passes: int = 1) -> Batch:
        """A step's batch without token values, of at most `cap` groups of micro-batches."""

        def make() -> Batch:
            unique_U, micro = self.distinct(rows), list[MicroBatch]()
            for count, size in groups(rows, micro_batch, cap, passes):
                ids_BT = torch.zeros(size, self.tokens, dtype=torch.long)
                table_rows = Rows(ids_BT, ids_BT, {}, unique_U)
                micro.append(Group({"input_ids": ids_BT}, ids_BT, table_rows, count=count))
                micro[-1].media = dict(self.media.tensors) if self.media is not None else {}
            tokens = rows * self.tokens
            batch = Batch(micro, tokens, tokens, unique_U, seed=0)
            batch.most_micro, batch.all_tokens = len(micro), tokens
            batch.loss_inputs = [(group.rows.ids, []) for group in micro]
            return batch

        return self.once(("batch", rows, micro_batch, cap, passes), make)

    def with_all_rows(self, batch: Batch, rows: int, ranks: int) -> Batch:
        """A rank's batch with the embedding rows of all ranks; the rank owns a block of these."""
        unique_U = self.distinct(rows)
        block = -(-len(unique_U) // ranks)
        padding = unique_U[-1].expand(block * ranks - len(unique_U))
        return replace(batch, unique_U=torch.cat([unique_U, padding]), own=slice(block))

    @property
    def media_bytes(self) -> int:
        """Bytes on the device of a row's pixels or sounds."""
        values = {} if self.media is None else self.media.tensors
        media = [value for name, value in values.items() if self.spec.capture.is_media(name)]
        return sum(as_computed(value[:0], self.dtype).itemsize * value.numel() for value in media)

    def media_work(self, rows: int) -> MediaWork:
        """The work of images and sounds in a micro-batch, from that of one row and that of two."""

        def measured(rows: int) -> MediaWork:
            key = *self._key, "media", rows
            return self._notes.noted(MediaWork, key, lambda: self._measurer.media(rows))

        return self.once(("media", rows), lambda: measured(1).of_rows(rows, measured(2)))

    def prologue(self, rows: int) -> Prologue:
        """The results and arguments of what comes before the layers."""
        if self.media is not None:
            return self.media_work(rows).prologue
        return self._of_rows(Prologue, ("prologue",), rows, lambda n: self._measurer.prologue(n))

    def _of_rows(
        self, kind: type[Value], part: tuple, rows: int, measure: Callable[[int], Value]
    ) -> Value:
        """A part's work for `rows`: measured, or on the line through that of two and three rows."""

        def measured(rows: int) -> Value:
            return self._notes.noted(kind, (*self._key, *part, rows), lambda: measure(rows))

        def extrapolated() -> Value:
            first, second = map(measured, _ROWS)
            if getattr(first, "structure", None) != getattr(second, "structure", None):
                return measured(rows)  # other operations, so that no line leads through both
            return cast(Value, on_line(first, second, rows - _ROWS[0], 1))

        return measured(rows) if rows in (1, *_ROWS) else self.once((*part, rows), extrapolated)

    def layer(self, visit: int, rows: int) -> LayerWork:
        """The work of a layer, which is that of the first layer of its kind."""
        visit = self._first_visit[visit]
        return self.once(("layer", visit, rows), lambda: self._layer(visit, rows))

    def _layer(self, visit: int, rows: int) -> LayerWork:

        def measure() -> LayerWork:
            if self.compiled and self._chunk_tokens is None:
                from megatrain.forecast.inductor_model import Trace, compiled_work

                def trace(rows: int) -> Trace:
                    return self._measurer.trace(visit, rows, self._entering(visit, rows))

                return compiled_work(self._of_rows(Trace, ("trace", visit), rows, trace))
            return self._measurer.layer(visit, rows, self._entering(visit, rows))

        work = self._notes.noted(LayerWork, (*self._key, "layer", visit, rows), measure)
        if not self._float8:
            return work
        from megatrain.model.adapters import adapted

        return work.in_float8(trained=adapted(self.spec.capture.model) is None)

    def _entering(self, visit: int, rows: int) -> dict[Ref, Shape]:
        """The shapes of the activations that enter a layer."""
        refs = [*self.spec.layers[visit].inputs, *dict(self.prologue(rows).results)]
        return {ref: self.shape(ref, rows) for ref in refs}

    def shape(self, ref: Ref, rows: int) -> Shape:
        if ref.visit < 0:  # no layer
            return dict(self.prologue(rows).results)[ref]
        return self.layer(ref.visit, rows).outputs[ref.leaf]

    def head(self, rows: int, chunk: int, loss: Loss) -> Work:
        """The work of epilogue, logits, loss and their gradients, `chunk` tokens at a time.

        Few tokens and chunks are measured; the work of more is affine in both. The peak of a single
        chunk is the largest of three lines, as its weights or its logits may decide it.
        """
        tokens = rows * self.tokens

        def run(tokens: int, chunk: int = chunk) -> Work:
            return self._head(rows, tokens, chunk, loss)

        num_chunks, largest = -(-tokens // chunk), 8192  # the largest chunk of any candidate
        if num_chunks == 1 and rows > 1:
            works = [
                on_line(run(size, largest), run(2 * size, largest), tokens - size, size)
                for size in (32, 512, largest // 2)
            ]
            return works[-1]._replace(peak_bytes=max(work.peak_bytes for work in works))
        if num_chunks <= 2:
            return run(tokens)
        half = chunk // 2
        lacking = num_chunks * chunk - tokens  # in the last chunk
        two_chunks, three_chunks = run(2 * chunk), run(3 * chunk)
        two_and_half = run(2 * chunk + half) if lacking else three_chunks
        fields = zip(two_chunks, three_chunks, two_and_half, strict=True)
        # A token that the last chunk lacks counts as those that half of the third chunk lacked.
        work = Work(
            *(
                of_two
                + (num_chunks - 2) * (of_three - of_two)
                - (of_three - of_two_and_half) * lacking // (chunk - half)
                for of_two, of_three, of_two_and_half in fields
            )
        )
        if tokens // chunk <= _CHUNKS_RUN:
            return work
        # The hidden states of all tokens may take more than a chunk's logits.
        return work._replace(peak_bytes=max(work.peak_bytes, self._hidden_bytes(rows, chunk)))

    def head_losses(self, rows: int, chunk: int, loss: Loss) -> Work:
        """The work of the visit that computes token losses alone, as a joint loss needs first."""
        return self._head(rows, rows * self.tokens, chunk, loss, losses=True)

    def _hidden_bytes(self, rows: int, chunk: int) -> int:
        """The peak of what comes before the projection to logits, which runs on all tokens."""

        def peak(rows: int) -> int:
            h = {ref: self.shape(ref, rows) for ref in self.spec.epilogue_inputs}
            epilogue = self._measurer.projected(rows, chunk, h)
            hidden_bytes = sum(shape.num_bytes for shape in epilogue.outputs.values())
            return epilogue.backward.peak_bytes + 2 * hidden_bytes  # and their gradients

        def noted(rows: int) -> int:
            return self._notes.noted(int, (*self._key, "hidden", rows, chunk), lambda: peak(rows))

        first = -(-chunk // self.tokens) + 1  # affine where there is more than one tile
        if rows <= first + 1:
            return noted(rows)
        return noted(first) + (noted(first + 1) - noted(first)) * (rows - first)

    def _head(
        self, rows: int, tokens: int, chunk: int, loss: Loss, *, losses: bool = False
    ) -> Work:
        """The measured work of a head for `tokens` tokens, shaped as one row or as several."""
        # A single row stays single: torch makes views of one row where it copies several. No row is
        # longer than those of a step: a model may have no more positions.
        fewest_rows = max(min(rows, 2), -(-tokens // self.tokens))
        num_rows = next(n for n in range(fewest_rows, tokens + 1) if tokens % n == 0)
        sizes = num_rows, tokens // num_rows

        def resized(ref: Ref) -> Shape:
            of_rows = self.shape(ref, rows)
            if ref in self.spec.routed:  # routers' sums over tokens
                return of_rows._replace(sizes=(1, *of_rows.sizes[1:]))
            pairs = [*pairwise(of_rows.sizes)]  # other dimensions may come first (Gemma 3n)
            dim = pairs.index((rows, self.tokens)) if (rows, self.tokens) in pairs else 0
            return of_rows._replace(sizes=of_rows.sizes[:dim] + sizes + of_rows.sizes[dim + 2 :])

        def measure() -> Work:
            refs = dict.fromkeys((*self.spec.epilogue_inputs, *self.spec.routed))
            h = {ref: resized(ref) for ref in refs}
            return self._measurer.head(losses, loss, sizes, chunk, h)

        loss_key = type(loss).__name__, *sorted(vars(loss).items())
        key = *self._key, "head", losses, *loss_key, *sizes, chunk
        return self._notes.noted(Work, key, measure)

    def counted(self, key: tuple, make: Callable[[], Work]) -> Work:
        """The work of a key that depends on no part of the model; `make` measures it."""
        return self._notes.noted(Work, ("counted", *key), make)

    @property
    def drawn(self) -> int:
        """The most values that are in memory at once when a model is randomly initialised."""

        def count() -> int:
            from megatrain.model.init import most_drawn_at_once

            return most_drawn_at_once(self._notes.opened())

        return self._notes.noted(int, ("drawn",), count)
