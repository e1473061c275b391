"""Which documents of a store are learnt from, in which order, and how much of each."""

import logging

import numpy as np
from numpy.typing import NDArray

from megatrain.data.dataset import Layout
from megatrain.data.packing import Segments, shuffled
from megatrain.data.sources import Kind
from megatrain.data.store import Store
from megatrain.errors import InputError

_log = logging.getLogger("megatrain.data")


def choose(store: Store, layout: Layout, seed: int) -> Segments:
    """The documents to learn from, shuffled, conversations not longer than a row.

    Raises:
        InputError: there are none, or one is longer than a row and that is an error.
    """
    documents = store.documents()
    lengths = (documents["end"] - documents["begin"]).astype(np.int64)
    learnable = documents["first_target"] >= 0
    if layout.kind != "text":
        lengths = _shorten(store, lengths, learnable, layout)
        learnable &= documents["first_target"] < lengths
    _report_unlearnable(store, learnable, layout.kind)
    each = 2 if layout.kind == "pairs" else 1  # both replies of a pair, or none
    whole = np.logical_and.reduce(learnable.reshape(-1, each), 1)
    if each == 2:
        _report_alike(store, lengths, whole)
    order = shuffled(len(whole), 0, seed)
    order = (each * order[whole[order]][:, None] + np.arange(each)).reshape(-1)
    return Segments(order, np.zeros_like(order), lengths[order])


def _shorten(
    store: Store, lengths: NDArray[np.int64], learnable: NDArray[np.bool_], layout: Layout
) -> NDArray[np.int64]:
    """Lengths after the rule for overlong conversations; 0 for dropped ones."""
    limit = layout.sequence_length
    overlong = np.flatnonzero(learnable & (lengths > limit))
    if len(overlong) == 0:
        return lengths
    example = f"{store.place(overlong[0])} has {lengths[overlong[0]]}"
    if layout.overlong == "error":
        raise InputError(
            f"{len(overlong)} conversations are longer than sequence_length {limit} ({example}): "
            "raise it, or set overlong to truncate or drop"
        )
    done = "truncated" if layout.overlong == "truncate" else "dropped"
    _log.warning(
        "%s %d of %d conversations, which are longer than sequence_length %d (%s)",
        done, len(overlong), len(lengths), limit, example,
    )  # fmt: skip
    lengths = lengths.copy()
    lengths[overlong] = limit if layout.overlong == "truncate" else 0
    return lengths


def _report_alike(store: Store, lengths: NDArray[np.int64], whole: NDArray[np.bool_]) -> None:
    """Warn of pairs whose replies differ only after the place where both are cut."""
    documents = store.documents()
    cut = (documents["end"] - documents["begin"] > lengths).reshape(-1, 2).all(1)
    alike = []
    for pair in np.flatnonzero(cut & whole).tolist():
        begins = (store.begin(document) for document in (2 * pair, 2 * pair + 1))
        one, other = (store.read(begin, begin + lengths[2 * pair])[0] for begin in begins)
        if np.array_equal(one, other):
            alike.append(pair)
    if alike:
        _log.warning(
            "%d of %d pairs are the same up to where they are truncated, and teach no preference "
            "(first: %s): raise sequence_length, or leave them out",
            len(alike), len(whole), store.place(2 * alike[0]),
        )  # fmt: skip


def _report_unlearnable(store: Store, learnable: NDArray[np.bool_], kind: Kind) -> None:
    useless = np.flatnonzero(~learnable)
    if len(useless) == 0:
        return
    what = "documents" if kind == "text" else "conversations"
    why = "no text" if kind == "text" else "no reply of the assistant inside a row"
    if len(useless) == len(learnable):
        raise InputError(
            f"all {len(learnable)} {what} have {why} (first: {store.place(useless[0])}): "
            "there is nothing to learn from"
        )
    _log.warning(
        "dropped %d of %d %s, which have %s (first: %s)",
        len(useless), len(learnable), what, why, store.place(useless[0]),
    )  # fmt: skip
