"""Hugging Face's `TrainerCallback` in a run: told what happens, and heeded where it asks."""

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.errors import InputError, first_line
from megatrain.train.setup import Job

log = logging.getLogger(__name__)


class Callbacks:
    """Calls those of a run at on_train_begin, on_step_begin, on_step_end, on_log, on_evaluate,
    on_save and on_train_end; their `model` is the engine.

    `should_save`, `should_evaluate` and `should_training_stop` are done at the step's end.
    """

    def __init__(self, given: Sequence[Any], job: Job, config: Config, folder: Path) -> None:
        """Make what callbacks are given; without any nothing is imported.

        Raises:
            InputError: one is no `TrainerCallback`.
        """
        self._all: list[Any] = []
        if not given:
            return
        from transformers import TrainerCallback, TrainerControl, TrainerState

        if not isinstance(given, list | tuple):
            raise InputError(f"callbacks: {given!r} is no list of transformers.TrainerCallback")
        self._all = [each() if isinstance(each, type) else each for each in given]
        for each in self._all:
            if not isinstance(each, TrainerCallback):
                raise InputError(f"callbacks: {each!r} is no transformers.TrainerCallback")
        self._job, self._log_every = job, config.output.log_every
        self._arguments = _arguments(config, folder, job.total_steps)
        self._state = TrainerState(
            max_steps=job.total_steps,
            global_step=job.resumed.step if job.resumed else 0,
            logging_steps=self._log_every,
            eval_steps=self._arguments.eval_steps,
            train_batch_size=config.training.batch_size,
        )
        self._control = TrainerControl()
        self._evaluated = -1  # the step of the last evaluation that they were told of
        if job.resumed is not None:
            self._load(job.resumed.callbacks)

    def state_dict(self) -> dict[str, Any]:
        """What those that are an `ExportableState` of transformers want to find again, as JSON."""
        if not self._all:
            return {}
        exported: defaultdict[str, list[Any]] = defaultdict(list)
        try:
            for each in self._exporting():
                exported[type(each).__name__].append(each.state()["attributes"])
            made: dict[str, Any] = json.loads(
                json.dumps({"evaluated": self._evaluated, "of": exported}, allow_nan=False)
            )
        except Exception as error:  # theirs; the run goes before
            log.warning("callbacks will begin anew on resume: %s", first_line(error))
            return {}
        return made

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._evaluated = saved.get("evaluated", self._state.global_step)
        there = {name: iter(states) for name, states in saved.get("of", {}).items()}
        for each in self._exporting():
            for name, value in next(there.get(type(each).__name__, iter(())), {}).items():
                setattr(each, name, value)

    def _exporting(self) -> list[Any]:
        from megatrain.compat.transformers import exports_state

        return [each for each in self._all if exports_state(each)]

    @property
    def stop(self) -> bool:
        """Whether one has asked for the end."""
        return bool(self._all) and self._control.should_training_stop

    def take(self, flag: str) -> bool:
        """Whether one has asked, by this flag of TrainerControl, since the last call."""
        if not self._all:
            return False
        asked = getattr(self._control, flag)
        setattr(self._control, flag, False)
        return asked

    def call(self, event: str, **more: Any) -> None:
        """An event that needs nothing more than what all are given."""
        for each in self._all:
            changed = getattr(each, event)(
                self._arguments,
                self._state,
                self._control,
                model=self._job.engine,
                processing_class=self._job.tokenizer,
                optimizer=self._job.engine.optimizer,
                lr_scheduler=self._job.schedule,
                train_dataloader=None,
                eval_dataloader=None,
                **more,
            )
            self._control = self._control if changed is None else changed

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done; its line of the log."""
        if not self._all:
            return
        self._state.global_step, self._state.epoch = record["step"], record["epoch"]
        self.call("on_step_end")
        if record["step"] % self._log_every == 0 and "loss" in record:
            names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
            self._log({there: record[here] for here, there in names.items()})

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """An evaluation is done; its line of the log. One that they know of is passed over."""
        if not self._all or record["step"] <= self._evaluated:
            return
        self._evaluated = record["step"]
        metrics = {name: value for name, value in record.items() if name.startswith("eval_")}
        self._log(metrics)
        self.call("on_evaluate", metrics=metrics)

    def found_best(self, step: int, value: float | None) -> None:
        """The best state so far; after `evaluated`, as in Trainer."""
        if self._all:
            self._state.best_metric, self._state.best_global_step = value, step

    def _log(self, logs: Mapping[str, Any]) -> None:
        told = {**logs, "epoch": self._state.epoch}
        self._state.log_history.append({**told, "step": self._state.global_step})
        self.call("on_log", logs=told)


def _arguments(config: Config, folder: Path, total_steps: int) -> Any:
    """What callbacks read of a run, under the names that they know."""
    from transformers import TrainingArguments

    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=total_steps,
        per_device_train_batch_size=config.training.batch_size,
        learning_rate=config.optimizer.settings["lr"],
        logging_steps=config.output.log_every,
        eval_strategy="steps" if config.eval_metrics else "no",
        eval_steps=config.training.eval_every or total_steps,
        save_strategy="no",
        metric_for_best_model=config.watched,
        greater_is_better=config.larger_is_better,
        seed=config.training.seed,
        report_to="none",
        use_cpu=True,  # it is not asked where to compute
    )
    made.load_best_model_at_end = config.checkpoint.load_best
    return made
