"""Evaluations of a run: no more rows at once than a step has."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatrain.config.learning import LossSection
from megatrain.errors import InputError
from megatrain.loss import IGNORED
from megatrain.parallel.distributed import ALONE
from megatrain.train.evaluations import Evaluations

Rows = Sequence[dict[str, Tensor]]


class Scale:
    """An engine whose loss of a labelled position is its label."""

    batch_ranks = ALONE

    def __init__(self):
        self.sizes: list[int] = []

    def score(self, rows):
        self.sizes.append(sum(len(micro["labels"]) for micro in rows))
        targets = torch.cat([micro["labels"][:, 1:].flatten() for micro in rows])
        labelled = targets[targets != IGNORED]
        if not len(labelled):
            raise InputError("no token has a label")
        return float(labelled.double().mean()), 0.5


def evaluated(labels, *, rows_per_step=4, stop=None, total=1):
    """The loss that is written after step 1 of `total`, and the rows of each pass."""
    engine, written = Scale(), {}
    micro = [{"input_ids": part, "labels": part} for part in labels.split(2)]
    job: Any = SimpleNamespace(
        engine=engine,
        evaluation={"": micro},
        total_steps=total,
        ranks=ALONE,
        loader=SimpleNamespace(rows_per_micro_batch=2),
        rollouts=None,
        data={},
    )
    training = SimpleNamespace(eval_every=1, batch_size=rows_per_step)
    metrics: Any = SimpleNamespace(write=lambda **record: written.update(record))
    job.config = cast(Any, SimpleNamespace(training=training, loss=LossSection(), rollout=None))
    signals: Any = SimpleNamespace(stop=stop)
    evaluations = Evaluations(job, metrics, [], signals)
    evaluations.after(1, lambda line: None, final=total == 1)
    return written.get("eval_loss"), engine.sizes


def test_rows_pass_as_many_at_once_as_a_step_has():
    labels = torch.arange(11 * 5).reshape(11, 5)
    labels[3:7, 2:] = IGNORED  # so that passes count for unlike numbers of tokens
    targets = labels[:, 1:]
    loss, sizes = evaluated(labels)
    assert sizes == [4, 4, 3]
    assert loss == pytest.approx(float(targets[targets != IGNORED].double().mean()))
    assert evaluated(labels, rows_per_step=1)[1] == [2, 2, 2, 2, 2, 1]


def test_rows_without_labels_are_left_out():
    labels = torch.ones(10, 3, dtype=torch.long)
    labels[4:8] = IGNORED
    assert evaluated(labels) == (1.0, [4, 2])


def test_no_labels_at_all_are_refused():
    with pytest.raises(InputError, match="no token has a label"):
        evaluated(torch.full((8, 3), IGNORED))


def test_a_signal_ends_all_but_the_last():
    labels = torch.ones(10, 3, dtype=torch.long)
    assert evaluated(labels, total=2) == (1.0, [4, 4, 2])
    assert evaluated(labels, stop="SIGTERM", total=2) == (None, [])
    assert evaluated(labels, stop="SIGTERM", total=1) == (1.0, [4, 4, 2])
