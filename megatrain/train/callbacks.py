"""Hugging Face's `TrainerCallback` in a run: told what happens, and heeded where it asks."""

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data import StreamLoader
from megatrain.errors import InputError, first_line
from megatrain.run_folder.layout import checkpoint_folder
from megatrain.telemetry.metrics import is_evaluation
from megatrain.train.setup import Job, steps_of

log = logging.getLogger(__name__)

_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate",
          "should_log")  # fmt: skip
_NEVER = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
# Of transformers' TrainerState; callbacks may add to `log_history`.
_OF_THE_RUN = (
    "epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps",
    "train_batch_size", "num_train_epochs", "best_metric", "best_global_step",
    "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero",
)  # fmt: skip
_OF_THE_TOKENIZER = ("chat_template", "eos_token", "bos_token", "pad_token", "unk_token")
_ABSENT = object()
_TRACKERS = {"WandbCallback": "wandb", "TrackioCallback": "trackio"}


class Callbacks:
    """Calls those of a run at Trainer's events, in its order; their `model` is the engine.

    What they ask for by `TrainerControl` is done at the step's end, but for `should_epoch_stop`.
    Each of several ranks calls its own; what one asks for is done by all.
    """

    def __init__(self, given: Sequence[Any], job: Job, config: Config, folder: Path) -> None:
        """Make what callbacks are given; without any nothing is imported.

        Raises:
            InputError: one is no `TrainerCallback`, or has an event that never comes.
        """
        self._all: list[Any] = []
        self._ranks = job.ranks
        self._epoch_begins, self._epoch_ends = True, False
        before = job.resumed.callbacks.get("names") if job.resumed else None
        if before not in (None, names_of(given)):
            log.warning("resume: callbacks were %s, and are %s now", before, names_of(given))
        if not given:
            return
        from transformers import TrainerControl, TrainerState

        self._all = _checked(given)
        self._job, self._folder, self._log_every = job, folder, config.output.log_every
        self._saves_best = config.checkpoint.best is not None
        self._arguments = _arguments(config, folder, job)
        self._state = TrainerState(
            epoch=0,
            max_steps=job.total_steps,
            num_train_epochs=_epochs(config, job),
            global_step=job.resumed.step if job.resumed else 0,
            logging_steps=self._log_every,
            eval_steps=self._arguments.eval_steps,
            save_steps=self._arguments.save_steps,
            train_batch_size=self._arguments.per_device_train_batch_size,
            is_local_process_zero=self._arguments.local_process_index == 0,
            is_world_process_zero=job.ranks.rank == 0,
        )
        self._control = TrainerControl()
        self._epochs_done = int(job.loader.epoch)
        self._evaluated = -1  # the step of the last evaluation that they were told of
        if job.resumed is not None:
            longer = job.resumed.differs(config, "training", "steps", "epochs")
            self._load(job.resumed.callbacks, longer=longer)
        self._losses: list[float] = []
        self.call("on_init_end")

    def state_dict(self) -> dict[str, Any]:
        """What those that are an `ExportableState` of transformers want to find again, as JSON."""
        if not self._all:
            return {}
        told = {"names": names_of(self._all), "asked": self._asked()}
        exported: defaultdict[str, list[Any]] = defaultdict(list)
        try:
            for each in self._exporting():
                exported[type(each).__name__].append(each.state()["attributes"])
            made: dict[str, Any] = json.loads(
                json.dumps({"evaluated": self._evaluated, "of": exported}, allow_nan=False)
            )
        except Exception as error:  # theirs; the run goes before
            log.warning("callbacks will begin anew on resume: %s", first_line(error))
            return told
        return told | made

    def _asked(self) -> list[bool]:
        return [bool(getattr(self._control, flag)) for flag in _ASKED]

    def _load(self, saved: Mapping[str, Any], *, longer: bool) -> None:
        """Args: `longer`: the run was given another length, so that no end asked for counts."""
        for flag, asked in zip(_ASKED, saved.get("asked", ()), strict=False):
            setattr(self._control, flag, asked and not (longer and flag == "should_training_stop"))
        self._evaluated = saved.get("evaluated", self._state.global_step)
        there = {name: iter(states) for name, states in saved.get("of", {}).items()}
        for each in self._exporting():
            for name, value in next(there.get(type(each).__name__, iter(())), {}).items():
                setattr(each, name, value)

    def _exporting(self) -> list[Any]:
        from megatrain.compat.transformers import exports_state

        return [each for each in self._all if exports_state(each)]

    def begin(self, logged: Sequence[Mapping[str, Any]]) -> None:
        """The first step comes next; the lines that the log has of earlier ones."""
        if not self._all:
            return
        for record in logged:
            self._state.epoch = record.get("epoch", self._state.epoch)
            evaluated = is_evaluation(record)
            if record["step"] <= self._evaluated if evaluated else self._is_logged(record):
                self._note(_metrics(record) if evaluated else _losses(record), record["step"])
        self._started = time.perf_counter()
        self.call("on_train_begin")

    def epoch(self, *, more: bool) -> bool:
        """Whether an epoch, or the last step, is over; `more` steps begin the next epoch."""
        ends = bool(self._all) and (self._epoch_ends or not more)
        if ends:
            self.call("on_epoch_end")
            self._epoch_begins = more
        return ends

    def end(self) -> None:
        """Tell callbacks that the run is over; all that it writes is there."""
        if not self._all:
            return
        seconds, steps = time.perf_counter() - self._started, len(self._losses)
        logs = {"train_runtime": seconds, "train_steps_per_second": steps / seconds}
        self._log(logs | ({"train_loss": sum(self._losses) / steps} if steps else {}))
        self.call("on_train_end")

    @property
    def stop(self) -> bool:
        """Whether a callback has asked for the end of the run."""
        return bool(self._all) and self._control.should_training_stop

    def take(self, flag: str) -> bool:
        """Whether one has asked, by this flag of TrainerControl, since the last call."""
        if not self._all:
            return False
        asked = getattr(self._control, flag)
        setattr(self._control, flag, False)
        return asked

    def step_begins(self) -> None:
        """The next step comes."""
        if self._epoch_begins:
            self.call("on_epoch_begin")
            self._epoch_begins = False
        self.call("on_step_begin")

    def call(self, event: str, **more: Any) -> None:
        """An event that needs nothing more than what all are given; all ranks' come together."""
        if not self._all:
            return
        asked = self._ranks.agree(lambda: self._called(event, **more))
        for flag, *flags in zip(_ASKED, *asked, strict=True):
            setattr(self._control, flag, any(flags))

    def _called(self, event: str, **more: Any) -> list[bool]:
        """What callbacks of this rank ask for after an event."""
        for each in self._all:
            before = self._read_once()
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
            now = self._read_once()
            if others := [name for name in now if now[name] != before.get(name, _ABSENT)]:
                raise InputError(
                    f"callbacks: {type(each).__name__}.{event} has changed {', '.join(others)}, "
                    "which the run does not read again; set it in the run file, or ask by "
                    "`control`"
                )
        return self._asked()

    def _read_once(self) -> dict[str, Any]:
        """What callbacks are given and the run has read already, or never reads."""
        tokenizer, schedule = self._job.tokenizer, self._job.schedule
        read = {f"args.{name}": value for name, value in vars(self._arguments).items()}
        read |= {f"state.{name}": getattr(self._state, name) for name in _OF_THE_RUN}
        read |= {f"processing_class.{n}": getattr(tokenizer, n, None) for n in _OF_THE_TOKENIZER}
        read["the number of tokens of processing_class"] = len(tokenizer)
        read["lr_scheduler.lr_lambdas"] = list(getattr(schedule, "lr_lambdas", ()))
        return read

    def step(self, record: Mapping[str, Any]) -> None:
        """Tell callbacks that a step is done, with its record in the log."""
        if not self._all:
            return
        self._state.global_step, self._state.epoch = record["step"], record["epoch"]
        epochs = int(self._job.loader.epoch)  # that of the record is rounded
        self._epoch_ends, self._epochs_done = epochs > self._epochs_done, epochs
        self.call("on_step_end")
        if self.take("should_epoch_stop"):
            log.warning("callbacks: should_epoch_stop is not heeded; an epoch is taken whole")
        if "loss" in record:
            self._losses.append(record["loss"])
        if self.take("should_log") or self._is_logged(record):
            self._log(_losses(record))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """An evaluation is done; its line of the log. One that they know of is passed over."""
        if not self._all or record["step"] <= self._evaluated:
            return
        self._evaluated = record["step"]
        metrics = _metrics(record)
        self._log(metrics)
        self.call("on_evaluate", metrics={**metrics, "epoch": self._state.epoch})

    def found_best(self, step: int, value: float | None) -> None:
        """The best state so far; after `evaluated`, as in Trainer."""
        if not self._all:
            return
        self._state.best_metric, self._state.best_global_step = value, step
        if self._saves_best:
            self._state.best_model_checkpoint = str(checkpoint_folder(self._folder, step))

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is whole; later ones may have been taken meanwhile."""
        if not self._all:
            return
        now, self._state.global_step = self._state.global_step, step
        self.call("on_save")
        self._state.global_step = now

    def _is_logged(self, record: Mapping[str, Any]) -> bool:
        return "loss" in record and record["step"] % self._log_every == 0

    def _note(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]:
        told = {**logs, "epoch": self._state.epoch}
        self._state.log_history.append({**told, "step": step})
        return told

    def _log(self, logs: Mapping[str, Any]) -> None:
        self.call("on_log", logs=self._note(logs, self._state.global_step))


def names_of(given: Any) -> str:
    """The names of callbacks, be they usable or not."""
    if not isinstance(given, list | tuple):
        return repr(given)
    return str([(each if isinstance(each, type) else type(each)).__name__ for each in given])


def _checked(given: Any) -> list[Any]:
    from transformers import TrainerCallback

    if not isinstance(given, list | tuple):
        raise InputError(f"callbacks: {given!r} is no list of transformers.TrainerCallback")
    made = [each() if isinstance(each, type) else each for each in given]
    for each in made:
        kind = type(each)
        if not isinstance(each, TrainerCallback):
            raise InputError(f"callbacks: {each!r} is no transformers.TrainerCallback")
        for event in _NEVER:
            if getattr(kind, event, None) is not getattr(TrainerCallback, event, None):
                raise InputError(
                    f"callbacks: {kind.__name__}.{event} would never be called: a step goes "
                    "through its micro-batches layer by layer, and updates a layer as it can; "
                    "take on_step_end"
                )
        if kind.__name__ in _TRACKERS or kind.__name__ == "SwanLabCallback":
            tracker = _TRACKERS.get(kind.__name__)
            remedy = f"set tracking.to: {tracker} in the run file" if tracker else "leave it out"
            raise InputError(f"callbacks: {kind.__name__} asks for a transformers model; {remedy}")
    return made


def _losses(record: Mapping[str, Any]) -> dict[str, Any]:
    names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    return {there: record[here] for here, there in names.items() if here in record}


def _metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in record.items() if name.startswith("eval_")}
    return {**found, "eval_runtime": found.get("eval_seconds")}


def _epochs(config: Config, job: Job) -> int:
    """Epochs that are begun; 1 of a stream, of which nobody knows."""
    if isinstance(job.loader, StreamLoader):
        return 1
    return math.ceil(job.total_steps / steps_of(1, config, job.loader))


def _arguments(config: Config, folder: Path, job: Job) -> Any:
    """What callbacks read of a run, under the names that they know."""
    from transformers import TrainingArguments

    total_steps = job.total_steps
    settings, every = config.optimizer.settings, config.checkpoint.every
    made = TrainingArguments(
        output_dir=str(folder),
        run_name=config.tracking.run_name or folder.name,
        max_steps=total_steps,
        num_train_epochs=config.training.epochs or 1.0,
        per_device_train_batch_size=-(-config.training.batch_size // job.ranks.size),
        learning_rate=settings["lr"],
        weight_decay=settings.get("weight_decay", 0.0),
        max_grad_norm=config.training.max_grad_norm or 0.0,
        lr_scheduler_type=config.schedule.name,
        warmup_steps=config.schedule.num_warmup_steps(total_steps),
        logging_steps=config.output.log_every,
        eval_strategy="steps" if config.eval_metrics else "no",
        eval_steps=config.training.eval_every or total_steps,
        save_strategy="steps" if every else "no",
        save_steps=every or total_steps,
        save_total_limit=config.checkpoint.keep,
        metric_for_best_model=config.watched,
        greater_is_better=config.larger_is_better,
        seed=config.training.seed,
        report_to="none",
        use_cpu=True,  # it is not asked where to compute
    )
    made.load_best_model_at_end = config.checkpoint.load_best
    made.bf16 = config.engine.precision == "bf16"
    return made
