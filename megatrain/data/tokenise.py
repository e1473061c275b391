"""Opens a data set: finds files, tokenises them once, chooses documents, arranges rows."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatrain.data import dataset
from megatrain.data.encoders import BadRows, Encoder, Examples, say_left_out
from megatrain.data.images import ImageProcessor
from megatrain.data.refused_fields import listed
from megatrain.data.row_packing import mixed
from megatrain.data.rows import Fields, Reading
from megatrain.data.sources import DataKind, open_sources
from megatrain.data.token_store import open_store
from megatrain.data.tokenizer import identity, pad_id
from megatrain.errors import InputError

_FORMAT = 19  # of kept tokens: raise this number when the same input gives other tokens
_log = logging.getLogger("megatrain.data")


def open_dataset(
    source: str | Path | Sequence[str | Path],
    *,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    cache_dir: str | Path,
    kind: DataKind = "auto",
    packing: bool = True,
    fields: Fields | None = None,
    bad_rows: BadRows = "stop",
    weights: Sequence[float] | None = None,
    repeat: bool = False,
    seed: int = 0,
    vocab_size: int | None = None,
    overlong: dataset.Overlong = "truncate",
    hub_config: str | None = None,
    hub_split: str = "train",
    images: ImageProcessor | None = None,
    labels: Sequence[str] = (),
    lines: int = 2,
) -> dataset.PackedDataset:
    """The data set of `source`, tokenised once (the tokens are kept in `cache_dir`), in rows.

    Args:
        source: files, folders and globs (docs/data.md), or the id of one hub data set.
        tokenizer: of transformers; chat data needs its chat template.
        sequence_length: tokens in a row, at most (packed: exactly).
        cache_dir: the folder for tokens; safe to delete between runs.
        packing: documents share rows without attending to one another; text is cut where a row
            is full, conversations stay whole; rows of compared replies are not packed.
        kind: "text"; "chat"; "auto": by the fields; "pairs", or pairs with "margins"; texts with
            "classes", "class_sets", or words with "tags"; "anchors": texts to embed.
        fields: our name of a field -> the data's name, or None: the field is ignored.
        bad_rows: raise at the first unusable row, or leave such rows out and list them.
        weights, repeat: shares of the tokens, one for each source; see `row_packing.mixed`.
        seed: decides which documents share rows and which are held out.
        overlong: the rule for conversations longer than a row. (Text is always split.)
        lines: texts of a row: 2 of "pairs"; of "anchors" the anchor, its positive and negatives.

    Raises InputError: data or tokenizer cannot be used; names the file and line, and the remedy.
    """
    if sequence_length < 2 or seed < 0:
        raise InputError(f"sequence_length is {sequence_length}, seed is {seed}: 2 and 0 at least")
    reading = Reading(kind, fields or {}, labels, lines)
    weighted = weights is not None
    sources, entries = open_sources(source, kind, hub_config, hub_split, weighted=weighted)
    examples = Examples(sources, reading, bad_rows)
    settings = [kind, reading.fields, bad_rows, vocab_size, identity(tokenizer), *labels]
    settings += [lines] if kind == "anchors" else []
    images = images or ImageProcessor(None)
    processor = [images.identity] if images.identity else []
    key = json.dumps([_FORMAT, settings, [s.identity for s in sources], *processor])
    name = "tokens-" + hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    store = open_store(
        Path(cache_dir).expanduser() / name,
        [s.name for s in sources],
        lambda: Encoder(tokenizer, vocab_size, images).documents(examples),
        examples.notes,
    )
    _log_notes(store.notes)
    layout = dataset.Layout(
        kind=kind if kind == "class_sets" else store.notes["kind"],
        sequence_length=sequence_length,
        packing=packing and kind not in dataset.OF_KIND,
        overlong=overlong,
        pad_id=pad_id(tokenizer, vocab_size),
        num_classes=len(labels),
        lines=lines if kind in dataset.REPLIES else 1,
    )
    documents = dataset.choose(store, layout, seed)
    part = f"seed {seed}"
    if weights is not None:
        entry_of_document = np.array(entries, np.int64)[store.documents()["source"]]
        documents = mixed(documents, entry_of_document, weights, repeat, seed)
        part += f", weights {list(weights)}{' with repetition' if repeat else ''}"
    if store.has_images:
        images.load()
        part += f", images {images.digest}"
    cls = dataset.OF_KIND.get(kind, dataset.PackedDataset)
    opened = cls(store, documents, layout, part)
    opened.image_processor = images
    return opened


def _log_notes(notes: Mapping[str, Any]) -> None:
    """Log the formats of the data in one line, then rows that were left out."""
    formats = ", ".join(
        f"{where}: {title}" if number == 1 else f"{number} files (first: {where}): {title}"
        for title, (number, where) in notes["formats"].items()
    )
    unread = f"; fields that are not read: {listed(notes['unread'])}" if notes["unread"] else ""
    _log.info("data: %s%s", formats, unread)
    number, first = notes["empty"]
    if number:
        _log.warning("%d rows teach an empty reply (first: %s)", number, first)
    if notes["num_bad"]:
        say_left_out(_log, "bad rows", notes["num_bad"], notes["bad"])
