"""Packs ranges of documents into rows, by their lengths alone, without reading tokens.

A *segment* is a range of one document's tokens. A row is a series of segments that do not attend to
one another: positions restart at each, and the first token of each is not predicted.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import InputError

Ints = NDArray[np.int64]
_WINDOW = 4096  # conversations packed together: enough to fill rows, few enough to stay shuffled


@dataclass(frozen=True)
class Segments:
    """Ranges of documents' tokens, in order: document, begin and end, each `[n]` int64."""

    document: Ints
    begin: Ints
    end: Ints

    @property
    def lengths(self) -> Ints:
        """`[n]`: the number of tokens in each segment."""
        return self.end - self.begin

    def __len__(self) -> int:
        return len(self.document)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.document.tolist(), self.begin.tolist(), self.end.tolist(), strict=True)

    def __getitem__(self, index: slice | Ints | NDArray[np.bool_]) -> "Segments":
        return Segments(self.document[index], self.begin[index], self.end[index])

    def cut(self, places: Ints) -> "Segments":
        """These segments, cut at `places` too: offsets into all their tokens end to end."""
        edges = np.concatenate([[0], np.cumsum(self.lengths)])
        inside = places[(places > 0) & (places < edges[-1])]
        starts = np.unique(np.concatenate([edges[:-1], inside]))
        uncut = np.searchsorted(edges, starts, side="right") - 1  # the segment with each start
        begin = self.begin[uncut] + starts - edges[uncut]
        lengths = np.diff(np.concatenate([starts, edges[-1:]]))
        return Segments(self.document[uncut], begin, begin + lengths)


@dataclass(frozen=True)
class PackedRows:
    """Rows of segments: row r is `segments[first[r]:first[r + 1]]`; `first` is `[rows + 1]`."""

    segments: Segments
    first: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    def keep(self, wanted: NDArray[np.bool_]) -> "PackedRows":
        """The rows for which `wanted` `[rows]` is True."""
        sizes = np.diff(self.first)
        return PackedRows(self.segments[np.repeat(wanted, sizes)], _offsets(sizes[wanted]))


def shuffled(count: int, *key: int) -> Ints:
    """The numbers below `count`, sorted by Philox output for `key`, which NumPy never changes."""
    random = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(random, kind="stable")


def mixed(
    segments: Segments, groups: Ints, weights: Sequence[float], repeat: bool, seed: int
) -> Segments:
    """Whole segments, chosen such that each group has its share of the tokens, and shuffled.

    Args:
        segments: taken from the first one on.
        groups: `[documents]`: the group of each.
        weights: `[groups]`: shares of the tokens, of any sum.
        repeat: take every segment at least once, and those of some groups more often; else no
            segment is taken twice.
    """
    group_of = groups[segments.document]
    tokens = np.bincount(group_of, segments.lengths, minlength=len(weights))
    if not tokens.all():
        number = int(np.flatnonzero(tokens == 0)[0]) + 1
        raise InputError(f"data.weights: path {number} has nothing to learn from: leave it out")
    per_weight = tokens / np.asarray(weights)
    times = np.asarray(weights) * (per_weight.max() if repeat else per_weight.min()) / tokens
    chosen: list[Ints] = []
    for group, group_times in enumerate(times.tolist()):
        members = np.flatnonzero(group_of == group)
        whole_times = int(group_times + 1e-9)  # 1 - 1e-16 is a 1 that was rounded
        rest_tokens = max(group_times - whole_times, 0) * tokens[group]
        num_rest = int(np.searchsorted(np.cumsum(segments.lengths[members]), rest_tokens + 0.5))
        chosen += [members] * whole_times + [members[:num_rest]]
    order = np.concatenate(chosen)
    return segments[order[shuffled(len(order), 2, seed)]]  # keys 0 and 1 shuffle rows


def fill_rows(segments: Segments, row_length: int) -> PackedRows:
    """Rows that are all full but the last: segments are cut where a row ends."""
    pieces = segments.cut(np.arange(0, segments.lengths.sum(), row_length, dtype=np.int64))
    starts = np.cumsum(pieces.lengths) - pieces.lengths
    return PackedRows(pieces, np.append(np.flatnonzero(starts % row_length == 0), len(pieces)))


def fit_rows(segments: Segments, row_length: int) -> PackedRows:
    """Rows of whole segments, each put into the fullest row that has room (best-fit decreasing).

    Segments are fitted in windows of `_WINDOW`, so that long ones do not all come first.
    Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024.
    """
    rows: list[list[int]] = []
    lengths = segments.lengths
    for start in range(0, len(segments), _WINDOW):
        window = lengths[start : start + _WINDOW]
        longest_first = start + np.argsort(-window, kind="stable")
        rows += _best_fit(longest_first.tolist(), lengths, row_length)
    order = np.array([s for row in rows for s in row], dtype=np.int64)
    return PackedRows(segments[order], _offsets(np.array([len(row) for row in rows], np.int64)))


def split_rows(segments: Segments, row_length: int) -> PackedRows:
    """Rows of one segment each; segments longer than a row are cut."""
    ends = np.cumsum(segments.lengths)
    starts = ends - segments.lengths
    too_long = np.flatnonzero(segments.lengths > row_length).tolist()
    cuts = [np.arange(starts[n] + row_length, ends[n], row_length) for n in too_long]
    pieces = segments.cut(np.concatenate(cuts)) if cuts else segments
    return PackedRows(pieces, np.arange(len(pieces) + 1, dtype=np.int64))


def _best_fit(order: list[int], lengths: Ints, row_length: int) -> list[list[int]]:
    """The segments of each row: each one in turn goes into the row with the least room for it."""
    rows: list[list[int]] = []
    free_rows: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for segment in order:
        length = int(lengths[segment])
        place = bisect.bisect_left(free_rows, (length, -1))
        if place < len(free_rows):
            free, row = free_rows.pop(place)
            rows[row].append(segment)
        else:
            free, row = row_length, len(rows)
            rows.append([segment])
        if free > length:
            bisect.insort(free_rows, (free - length, row))
    return rows


def _offsets(sizes: Ints) -> Ints:
    """The places where ranges of these sizes, end to end, begin; and the end of the last."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
