"""The teacher of a run that distils: its likeliest tokens for each label, computed once."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from megatrain.api import Engine
from megatrain.checkpoint import Checkpoint
from megatrain.config import Config, ModelSection
from megatrain.data import (
    PackedDataset,
    Step,
    TeacherAnswers,
    load_tokenizer,
    open_teacher_file,
    plain_rows,
)
from megatrain.data.teacher_file import TeacherFile
from megatrain.errors import InputError, MegatrainError
from megatrain.forecast.workload import usual_micro_batch
from megatrain.loss import IGNORED
from megatrain.model.companions import tokenizer_files
from megatrain.model.weights import resolve_model
from megatrain.parallel.distributed import Ranks
from megatrain.train.data import cache_folder
from megatrain.train.model_config import check_sequence_length, model_config
from megatrain.train.resolve_model import ResolvedModel
from megatrain.train.sharing import by_parts

_FORMAT = 2  # of what is kept: raise it when the same teacher would be asked otherwise
_NOT_KEPT = -1e9  # in place of a log-probability
_SECONDS_BETWEEN_NEWS = 30.0
log = logging.getLogger(__name__)


def frozen_engine(config: Config, source: Any, **given: Any) -> Engine:
    """A model in an engine that trains nothing, on the run's device and within its limits.

    Args:
        source, given: as `Engine` takes them.

    Raises:
        InputError, DoesNotFit: as `Engine`.
    """
    return Engine(
        source,
        precision=config.engine.precision,
        max_grad_norm=None,
        device=None if config.engine.device == "auto" else config.engine.device,
        device_memory=config.engine.device_memory,
        host_memory=config.engine.host_memory,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        **given,
    )


@dataclass(frozen=True)
class Teacher:
    """A model whose likeliest tokens the trained model learns.

    Attributes:
        source: what an engine takes.
        key: tells its weights from others.
        vocab_size: of the model that learns: it has no other tokens.
    """

    config: Config
    source: Checkpoint | str
    key: str
    vocab_size: int

    def engine(self, **placed: Any) -> Engine:
        """The teacher in an engine that trains nothing. Raises InputError, DoesNotFit."""
        made = frozen_engine(self.config, self.source, **placed)
        if made.label_shift != 1:
            made.close()
            raise InputError("loss.teacher: it predicts tokens in their own place; take another")
        return made

    def answers(self, engine: Engine, step: Step) -> Iterator[TeacherAnswers]:
        """For each micro-batch: labels, and ids and log-probabilities of likeliest tokens."""
        loss, rows = self.config.loss, plain_rows(step)
        most = loss.top_k or 1
        labelled = any(bool((micro["labels"][:, 1:] != IGNORED).any()) for micro in rows)
        if any(engine.ranks.all_gather_object(labelled)):  # it is asked by all ranks or none
            found = engine.top_logprobs(rows, most, loss.temperature or 1.0)
        else:
            shapes = [(*micro["labels"].shape, most) for micro in rows]
            found = [(torch.zeros(s, dtype=torch.int64), torch.zeros(s)) for s in shapes]
        for micro, (ids, log_probs) in zip(rows, found, strict=True):
            strange = ids >= self.vocab_size  # rows of its table that stand for no token
            kept = log_probs.masked_fill(strange, _NOT_KEPT)
            yield micro["labels"], ids.masked_fill(strange, 0), kept

    def key_of(self, data: PackedDataset) -> str:
        """A hash of all that the answers depend on: data, weights, and how they are asked for."""
        loss, precision = self.config.loss, self.config.engine.precision
        asked = [loss.top_k, loss.temperature, precision, self.vocab_size]
        parts = [_FORMAT, self.key, data.fingerprint, len(data), asked]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def find_teacher(
    config: Config, tokenizer: PreTrainedTokenizerBase, text_config: PreTrainedConfig
) -> Teacher | None:
    """The teacher of a run file, if it names one; its weights are not read yet.

    Raises:
        InputError: there is no such model, or it cannot teach this one.
    """
    if config.loss.teacher is None:
        return None
    trusted = config.model.trust_remote_code
    named = ModelSection(path=config.loss.teacher, trust_remote_code=trusted)
    try:
        resolved = ResolvedModel.of(named)
        found = model_config(resolved.section, tokenizer)
        check_sequence_length(found, config.data.sequence_length)
        assert resolved.section.path is not None and resolved.source is not None
        folder = resolve_model(resolved.section.path)
        there = any(tokenizer_files(folder))
        own = load_tokenizer(str(folder), trust_remote_code=trusted) if there else None
    except InputError as error:
        raise InputError(f"loss.teacher: {error}") from error
    size = found.get_text_config(decoder=True).vocab_size
    same = (
        size == text_config.vocab_size if own is None else own.get_vocab() == tokenizer.get_vocab()
    )
    if not same:
        raise InputError(
            f"loss.teacher: {config.loss.teacher} has another vocabulary than the model that is "
            "trained, so their tokens cannot be compared; take a teacher with the same tokenizer"
        )
    if (top_k := config.loss.top_k or 0) > (most := min(size, text_config.vocab_size)):
        raise InputError(f"loss.top_k is {top_k}, and the vocabulary has {most} tokens; take fewer")
    if own is None:
        log.warning(
            "loss.teacher: %s has no tokenizer's files: its tokens are taken for those of the "
            "model that is trained, for there are as many",
            config.loss.teacher,
        )
    return Teacher(config, resolved.source, resolved.key, text_config.vocab_size)


def ask(teacher: Teacher, sets: dict[str, PackedDataset], ranks: Ranks) -> None:
    """Let data sets have what the teacher says of each of their labels, computed once.

    Several `ranks` compute it together, and the first one writes it to the folder of all.

    Raises:
        InputError: it cannot be asked, or the answers cannot be kept.
        DoesNotFit: more memory is needed than there is.
    """
    config = teacher.config
    for name, data in sets.items():
        folder = cache_folder(config) / f"teacher-{teacher.key_of(data)}"
        given = folder, len(data), config.loss.top_k or 1
        with _Asking(teacher, name, data, ranks) as asking:
            ranks.agree(asking.follow if ranks.rank else partial(_keep, asking, *given))
        data.learn_from(TeacherFile(folder, config.loss.top_k or 1))


def _keep(asking: "_Asking", folder: Path, num_rows: int, top_k: int) -> None:
    try:
        open_teacher_file(folder, num_rows, top_k, asking.answers)
    finally:
        asking.end()


class _Asking:
    """Forward passes of a teacher over a data set; all ranks make them, the first one leads."""

    def __init__(self, teacher: Teacher, name: str, data: PackedDataset, ranks: Ranks) -> None:
        config = teacher.config
        training, length = config.training, config.data.sequence_length
        self._teacher, self._name, self._data, self._ranks = teacher, name, data, ranks
        usual = training.micro_batch_size or usual_micro_batch(length)
        self._rows = min(usual, -(-training.batch_size // ranks.size))
        self._each = max(self._rows, training.batch_size // self._rows * self._rows)  # of a sweep
        self._size = {
            "tokens_per_step": training.batch_size * length,
            "sequence_length": length,
            "micro_batch": self._rows,
        }
        self._engine: Engine | None = None  # until it is needed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def answers(self, done: int) -> Iterator[TeacherAnswers]:
        """The teacher's answers for the rows from `done` on."""
        count, told = len(self._data), time.monotonic()
        log.info("asking the teacher of %s rows (%s)", f"{count - done:,}", self._name.strip())
        for first in range(done, count, self._each):
            self._ranks.all_gather_object(first)
            yield from self._sweep(first)
            if time.monotonic() - told > _SECONDS_BETWEEN_NEWS:
                told, last = time.monotonic(), min(first + self._each, count)
                log.info("the teacher has answered for %s of %s rows", f"{last:,}", f"{count:,}")

    def follow(self) -> None:
        """On other ranks: make each forward pass that the first rank makes."""
        while (first := self._ranks.all_gather_object(0)[0]) is not None:
            try:
                self._sweep(first)
            except MegatrainError:  # of all ranks, of which the first one says that it ends
                self.end()
                raise

    def end(self) -> None:
        """Tell the other ranks that no forward pass follows."""
        self._ranks.all_gather_object(None)

    def _sweep(self, first: int) -> list[TeacherAnswers]:
        if self._engine is None:
            self._engine = self._teacher.engine(**self._size, group=self._ranks.host)
        last = min(first + self._each, len(self._data))
        starts = range(first, last, self._rows)
        step = [self._data.batch(range(at, min(at + self._rows, last))) for at in starts]
        answer, engine = self._teacher.answers, self._engine
        return by_parts(self._ranks, step, lambda own: list(answer(engine, own)))
