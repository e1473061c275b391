"""Texts with classes: rows with the labels of heads that classify them, or each of their words."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatrain.data.dataset import MicroBatch, PackedDataset
from megatrain.data.preferences import scored
from megatrain.data.row_packing import Ints
from megatrain.loss import IGNORED

CLASSES = ("classes", "class_sets", "tags")
"""Kinds of data with classes: one of a text, several, or one of each word."""


class ClassDataset(PackedDataset):
    """Texts, each a row."""

    def pieces(self, row: int) -> Iterator[tuple[Ints, Ints]]:
        [(ids, labels)] = super().pieces(row)
        labels[:-1] = IGNORED  # a text's classes are those of its last token
        if self.kind == "tags":
            labels[:] = self._labels(row)[: len(ids)]
        yield ids, labels

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        batch, own = super().batch(rows), [self._labels(row) for row in rows]
        if self.kind == "tags":  # also of a row's first token, which texts do not learn
            batch["labels"][:, 0] = torch.tensor([int(labels[0]) for labels in own])
            return batch
        labels = scored(batch["input_ids"], batch.get("attention_mask"), self.pad)
        if self.kind == "classes":
            labels = labels.where(labels < 0, torch.tensor(np.stack(own)))
        else:
            count = self._layout.num_classes
            shape, truths = (*labels.shape, count), torch.zeros(len(rows), count)
            for truth, classes in zip(truths, own, strict=True):
                truth[torch.from_numpy(classes)] = 1
            batch["classes"] = torch.arange(count).expand(shape).contiguous()
            batch["truths"] = truths[:, None].expand(shape).contiguous()
        return batch | {"labels": labels}

    def _labels(self, row: int) -> Ints:
        return self.store.labels(int(self._segments(row).document[0]))
