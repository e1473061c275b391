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
from megatrain.distributed import Ranks
from megatrain.placement import Placement
from megatrain.telemetry.gpu import find_gpu
from megatrain.train.model_config import model_config
from megatrain.train.references import References, refer_to
from megatrain.train.resolve_model import begun_from, moved_base, named_model, weights_key
from megatrain.train.resume import Start
from megatrain.train.teacher import Teacher, ask, frozen_engine

log = logging.getLogger(__name__)


class SecondModel:
    """Frozen weights in host memory, and what they say of each micro-batch of a step.

    Several ranks share it, and each asks it of its own micro-batches.
    """

    def __init__(
        self, engine: Engine, name: str, says: Callable[[Engine, Step], list[MicroBatch]]
    ) -> None:
        """Args: `name` is what metrics call its time by."""
        self._engine, self._name, self._says = engine, name, says

    def beside(self, step: Step) -> tuple[Step, dict[str, float]]:
        """The micro-batches with what it says of them; and what the log has of how long it took."""
        started = time.perf_counter()
        made = self.with_said(step)
        return made, {f"{self._name}_seconds": round(time.perf_counter() - started, 6)}

    def with_said(self, step: Step) -> Step:
        """The micro-batches with what it says of them."""
        said = self._says(self._engine, step)
        return [micro | more for micro, more in zip(step, said, strict=True)]

    def close(self) -> None:
        """Give its memory back."""
        self._engine.close()


def begun_model(config: Config, tokenizer: PreTrainedTokenizerBase, group: Any = None) -> Engine:
    """The model as the run begins, in an engine that trains nothing; `group`: as `Engine`'s."""
    section, source = named_model(begun_from(config))
    log.info("the reference model rests in host memory beside the one that is trained")
    return frozen_engine(
        config,
        model_config(section, tokenizer) if source is None else source,
        placement=Placement(compile=_compiled(config)),
        seed=config.training.seed,
        base=config.model.base,
        base_model=moved_base(begun_from(config).base_model),
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
    tokenizer: PreTrainedTokenizerBase,
    teacher: Teacher | None,
    sets: dict[str, Any],
    start: Start | None,
    ranks: Ranks,
) -> tuple[SecondModel | None, References | None]:
    """What is streamed with each step of a run, and what it is known by; None: nothing is.

    The reference of replies that the model makes itself is known, too; their rollouts open it.
    Data sets get what a teacher says that is kept. It comes before the model that is trained, so
    that `auto` places that one in the memory that is left.

    Raises:
        InputError: it cannot be used, or is another one than the run began with.
        DoesNotFit: more memory is needed than there is.
    """
    of_replies = config.loss.kind == "prompts" and bool(config.loss.beta)
    if teacher is None and config.loss.reference != "streamed" and not of_replies:
        return None, None
    if teacher is None:
        known = refer_to(weights_key(*named_model(begun_from(config))), start)
        if of_replies:
            return None, known
        engine = begun_model(config, tokenizer, ranks.host)
        return SecondModel(engine, "reference", _reference), known
    known = refer_to(teacher.key, start)
    if config.loss.teacher_log_probs == "kept":
        ask(teacher, sets, ranks)
        return None, known
    log.info("the teacher rests in host memory beside the model that is trained")
    engine = teacher.engine(placement=Placement(), group=ranks.host)
    return SecondModel(engine, "teacher", partial(_said, teacher)), known


def _said(teacher: Teacher, engine: Engine, step: Step) -> list[MicroBatch]:
    said = teacher.says(engine, step)
    return [{IDS: ids, LOG_PROBS: log_probs} for _, ids, log_probs in said]


def _reference(engine: Engine, step: Step) -> list[MicroBatch]:
    sums = [each.double().sum(1).float() for each in engine.logprobs(plain_rows(step))]
    return [
        {"reference_logp": at_first_label(each, micro["labels"])}
        for each, micro in zip(sums, step, strict=True)
    ]
