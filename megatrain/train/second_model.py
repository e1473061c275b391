"""A second model that is streamed beside the one that is trained: a reference, or a teacher."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatrain.api import Engine
from megatrain.autoplace.auto import can_compile
from megatrain.config import Config
from megatrain.data import IDS, LOG_PROBS, MicroBatch, Step, at_first_label, plain_rows
from megatrain.parallel.distributed import Ranks
from megatrain.placement import Placement
from megatrain.telemetry.gpu import find_gpu
from megatrain.train.references import References, refer_to
from megatrain.train.resolve_model import ResolvedModel
from megatrain.train.resume import Start
from megatrain.train.teacher import Teacher, ask, frozen_engine

log = logging.getLogger(__name__)


class SecondModel:
    """A frozen model in host memory, which gives each micro-batch further tensors.

    Several ranks share it, and each asks it of its own micro-batches.
    """

    def __init__(
        self, engine: Engine, name: str, answers: Callable[[Engine, Step], list[MicroBatch]]
    ) -> None:
        """Take the model.

        Args:
            name: in metrics, of the seconds that it takes.
            answers: the tensors for each micro-batch of a step.
        """
        self._engine, self._name, self._answers = engine, name, answers

    def beside(self, step: Step) -> tuple[Step, dict[str, float]]:
        """`with_answers`, and the metric of the seconds that it took."""
        started = time.perf_counter()
        made = self.with_answers(step)
        return made, {f"{self._name}_seconds": round(time.perf_counter() - started, 6)}

    def with_answers(self, step: Step) -> Step:
        """The micro-batches, each with the tensors that this model gives it."""
        answers = self._answers(self._engine, step)
        return [micro | more for micro, more in zip(step, answers, strict=True)]

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.close()


def begun_model(
    config: Config, begun: ResolvedModel, tokenizer: PreTrainedTokenizerBase, group: Any = None
) -> Engine:
    """The model as the run begins, in an engine that trains nothing; `group`: as `Engine`'s."""
    log.info("the reference model rests in host memory beside the one that is trained")
    return frozen_engine(
        config,
        begun.taken(tokenizer),
        placement=Placement(compile=_compiled(config)),
        seed=config.training.seed,
        base=config.model.base,
        base_model=begun.base_model,
        group=group,
    )


def _compiled(config: Config) -> bool:
    """Whether the layers of the model that is trained are, whose kinds the reference has."""
    given = config.engine.placement
    if given != "auto":
        return bool(given.get("compile", False))
    return config.engine.device != "cpu" and find_gpu("cuda") is not None and can_compile()


def second_model(
    config: Config,
    begun: Callable[[], ResolvedModel],
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    sets: dict[str, Any],
    start: Start | None,
    ranks: Ranks,
) -> tuple[SecondModel | None, References | None]:
    """The model that is streamed beside each step of a run, and its record; None: there is none.

    The reference of replies that the model makes itself is known, too; their rollouts open it.
    Data sets get the answers of a teacher that are kept. This model is opened before the one that
    is trained, so that `auto` places the latter in the memory that is left.

    Raises:
        InputError: it cannot be used, or is another one than the run began with.
        DoesNotFit: more memory is needed than there is.
    """
    of_replies = config.loss.kind == "prompts" and bool(config.loss.beta)
    if teacher is None and config.loss.reference != "streamed" and not of_replies:
        return None, None
    if teacher is None:
        known = refer_to(begun().key, start)
        if of_replies:
            return None, known
        engine = begun_model(config, begun(), tokenizer, ranks.host)
        return SecondModel(engine, "reference", _reference), known
    known = refer_to(teacher.key, start)
    if config.loss.teacher_log_probs == "kept":
        ask(teacher, sets, ranks)
        return None, known
    log.info("the teacher rests in host memory beside the model that is trained")
    engine = teacher.engine(placement=Placement(), group=ranks.host)
    return SecondModel(engine, "teacher", partial(_teacher_tensors, teacher)), known


def _teacher_tensors(teacher: Teacher, engine: Engine, step: Step) -> list[MicroBatch]:
    found = teacher.answers(engine, step)
    return [{IDS: ids, LOG_PROBS: log_probs} for _, ids, log_probs in found]


def _reference(engine: Engine, step: Step) -> list[MicroBatch]:
    sums = [each.double().sum(1).float() for each in engine.logprobs(plain_rows(step))]
    return [
        {"reference_logp": at_first_label(each, micro["labels"])}
        for each, micro in zip(sums, step, strict=True)
    ]
