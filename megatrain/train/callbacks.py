"""Hugging Face's `TrainerCallback` in a run: calls at its events, and obeys its requests."""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatrain.compat.transformers import exports_state
from megatrain.data import StreamLoader
from megatrain.errors import InputError, first_line
from megatrain.parallel.distributed import local_rank
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
_TRACKERS = {
    "WandbCallback": "set tracking.to: wandb in the run file",
    "TrackioCallback": "set tracking.to: trackio in the run file",
    "SwanLabCallback": "leave it out",
}


class Callbacks:
    """Calls those of a run at Trainer's events, in its order; their `model` is the engine.

    Requests through `TrainerControl` are met at the step's end, except `should_epoch_stop`.
    Each rank calls its own; all ranks meet the requests of each.
    """

    def __init__(self, callbacks: Sequence[Any], job: Job) -> None:
        """Prepare callbacks; classes are instantiated.

        Raises InputError: one is no `TrainerCallback`, or has an event that never comes.
        """
        names, resumed, config = names_of(callbacks), job.resumed, job.config
        before = resumed.callbacks.get("names") if resumed else None
        if before not in (None, names):
            log.warning("resume: callbacks were %s, and are %s now", before, names)
        self._all = _checked(callbacks)
        self._arguments = _arguments(job) if self._all else None
        self._job, self._log_every = job, config.output.log_every
        self._saves_best = config.checkpoint.best is not None
        total, rows = job.total_steps, config.training.batch_size
        of_a_stream = isinstance(job.loader, StreamLoader)  # its length is unknown
        self._state = TrainerState(
            epoch=0,
            max_steps=total,
            num_train_epochs=1 if of_a_stream else -(-total // steps_of(1, config, job.loader)),
            global_step=resumed.step if resumed else 0,
            logging_steps=self._log_every,
            eval_steps=config.training.eval_every or total,
            save_steps=config.checkpoint.every or total,
            train_batch_size=-(-rows // job.ranks.size),
            is_local_process_zero=not local_rank(job.ranks.host),
            is_world_process_zero=job.ranks.rank == 0,
        )
        self._control = TrainerControl()
        self._epoch_begins, self._epoch_ends = True, False
        self._epochs_done = int(job.loader.epoch)
        self._evaluated = -1  # the step of the last evaluation that callbacks have seen
        if resumed is not None:
            longer = resumed.differs(config, "training", "steps", "epochs")
            self._load(resumed.callbacks, longer=longer)
        self._losses: list[float] = []
        self.call("on_init_end")

    def state_dict(self) -> dict[str, Any]:
        """Requests, and the states of those that are transformers' `ExportableState`, as JSON."""
        if not self._all:
            return {}
        state = {"names": names_of(self._all), "asked": self._asked()}
        exported: defaultdict[str, list[Any]] = defaultdict(list)
        try:
            for callback in filter(exports_state, self._all):
                exported[type(callback).__name__].append(callback.state()["attributes"])
            more = {"evaluated": self._evaluated, "of": exported}
            return state | json.loads(json.dumps(more, allow_nan=False))
        except Exception as error:  # of a user's code; the run goes on
            log.warning("callbacks will begin anew on resume: %s", first_line(error))
            return state

    def _asked(self) -> list[bool]:
        return [bool(getattr(self._control, flag)) for flag in _ASKED]

    def _load(self, saved: Mapping[str, Any], *, longer: bool) -> None:
        """Args: `longer`: the run's length has changed, so earlier requests to stop lapse."""
        if not self._all:
            return
        for flag, asked in zip(_ASKED, saved.get("asked", ()), strict=False):
            setattr(self._control, flag, asked and not (longer and flag == "should_training_stop"))
        self._evaluated = saved.get("evaluated", self._state.global_step)
        states = {name: iter(of_class) for name, of_class in saved.get("of", {}).items()}
        for callback in filter(exports_state, self._all):
            for name, value in next(states.get(type(callback).__name__, iter(())), {}).items():
                setattr(callback, name, value)

    def begin(self, logged: Sequence[Mapping[str, Any]]) -> None:
        """Tell callbacks that training begins. Args: the log's records of earlier steps."""
        for record in logged:
            self._state.epoch = record.get("epoch", self._state.epoch)
            evaluated = is_evaluation(record)
            if record["step"] <= self._evaluated if evaluated else self._is_logged(record):
                self._note(_metrics(record) if evaluated else _losses(record), record["step"])
        self._started = time.perf_counter()
        self.call("on_train_begin")

    def epoch(self, *, more: bool) -> bool:
        """True if an epoch, or the last step, is over; `more` steps begin the next epoch."""
        ends = bool(self._all) and (self._epoch_ends or not more)
        if ends:
            self.call("on_epoch_end")
            self._epoch_begins = more
        return ends

    def end(self) -> None:
        """Tell callbacks that the run is over and all its files are written."""
        seconds, steps = time.perf_counter() - self._started, len(self._losses)
        logs = {"train_runtime": seconds, "train_steps_per_second": steps / seconds}
        self._log(logs | ({"train_loss": sum(self._losses) / steps} if steps else {}))
        self.call("on_train_end")

    @property
    def stop(self) -> bool:
        """True if a callback has asked for the end of the run."""
        return self._control.should_training_stop

    def take(self, flag: str) -> bool:
        """True if a callback has set this flag of TrainerControl since the last call."""
        asked = getattr(self._control, flag)
        setattr(self._control, flag, False)
        return asked

    def step_begins(self) -> None:
        """Tell callbacks that the next step begins."""
        if self._epoch_begins:
            self.call("on_epoch_begin")
            self._epoch_begins = False
        self.call("on_step_begin")

    def call(self, event: str, **more: Any) -> None:
        """Call an event that has no further arguments, and combine the requests of all ranks."""
        if not self._all:
            return
        asked = self._job.ranks.agree(lambda: self._called(event, **more))
        for flag, *flags in zip(_ASKED, *asked, strict=True):
            setattr(self._control, flag, any(flags))

    def _called(self, event: str, **more: Any) -> list[bool]:
        """Call callbacks of this rank; returns their requests."""
        for callback in self._all:
            before = self._read_once()
            changed = getattr(callback, event)(
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
                name = f"{type(callback).__name__}.{event}"
                raise InputError(
                    f"callbacks: {name} has changed {', '.join(others)}, which the run does not "
                    "read again; set it in the run file, or ask by `control`"
                )
        return self._asked()

    def _read_once(self) -> dict[str, Any]:
        """Values that callbacks see but the run does not read again; changed ones are refused."""
        tokenizer, schedule = self._job.tokenizer, self._job.schedule
        read = {f"args.{name}": value for name, value in vars(self._arguments).items()}
        read |= {f"state.{name}": getattr(self._state, name) for name in _OF_THE_RUN}
        read |= {f"processing_class.{n}": getattr(tokenizer, n, None) for n in _OF_THE_TOKENIZER}
        read["the number of tokens of processing_class"] = len(tokenizer)
        read["lr_scheduler.lr_lambdas"] = list(getattr(schedule, "lr_lambdas", ()))
        return read

    def step(self, record: Mapping[str, Any]) -> None:
        """Tell callbacks that a step is done, with its record in the log."""
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
        """Tell callbacks of an evaluation's record, unless they have seen it."""
        if record["step"] <= self._evaluated:
            return
        self._evaluated = record["step"]
        metrics = _metrics(record)
        self._log(metrics)
        self.call("on_evaluate", metrics={**metrics, "epoch": self._state.epoch})

    def found_best(self, step: int, value: float | None) -> None:
        """Note the best state so far; called after `evaluated`, as in Trainer."""
        self._state.best_metric, self._state.best_global_step = value, step
        if self._saves_best:
            self._state.best_model_checkpoint = str(checkpoint_folder(self._job.folder, step))

    def saved(self, step: int) -> None:
        """Tell callbacks that the checkpoint of `step` is whole; later steps may be done by now."""
        now, self._state.global_step = self._state.global_step, step
        self.call("on_save")
        self._state.global_step = now

    def _is_logged(self, record: Mapping[str, Any]) -> bool:
        return "loss" in record and record["step"] % self._log_every == 0

    def _note(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]:
        logs = {**logs, "epoch": self._state.epoch}
        self._state.log_history.append({**logs, "step": step})
        return logs

    def _log(self, logs: Mapping[str, Any]) -> None:
        self.call("on_log", logs=self._note(logs, self._state.global_step))


def names_of(callbacks: Any) -> str:
    """The names of callbacks, even of unusable ones."""
    if not isinstance(callbacks, list | tuple):
        return repr(callbacks)
    return str([(c if isinstance(c, type) else type(c)).__name__ for c in callbacks])


def _checked(callbacks: Any) -> list[Any]:
    if not isinstance(callbacks, list | tuple):
        raise InputError(f"callbacks: {callbacks!r} is no list of transformers.TrainerCallback")
    instances = [c() if isinstance(c, type) else c for c in callbacks]
    for callback in instances:
        kind, name = type(callback), type(callback).__name__
        if not isinstance(callback, TrainerCallback):
            raise InputError(f"callbacks: {callback!r} is no transformers.TrainerCallback")
        for event in _NEVER:
            if getattr(kind, event, None) is not getattr(TrainerCallback, event, None):
                raise InputError(
                    f"callbacks: {name}.{event} would never be called: a step goes through its "
                    "micro-batches layer by layer, and updates a layer when its gradient is ready; "
                    "take on_step_end"
                )
        if name in _TRACKERS:
            raise InputError(f"callbacks: {name} asks for a transformers model; {_TRACKERS[name]}")
    return instances


def _losses(record: Mapping[str, Any]) -> dict[str, Any]:
    names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    return {theirs: record[ours] for ours, theirs in names.items() if ours in record}


def _metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: value for name, value in record.items() if name.startswith("eval_")}
    return {**metrics, "eval_runtime": metrics.get("eval_seconds")}


def _arguments(job: Job) -> Any:
    """The run's settings under the names that callbacks know."""
    config, folder, total_steps = job.config, job.folder, job.total_steps
    settings, every = config.optimizer.settings, config.checkpoint.every
    arguments = TrainingArguments(
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
        use_cpu=True,  # else it would look for a device
    )
    arguments.load_best_model_at_end = config.checkpoint.load_best
    arguments.bf16 = config.engine.precision == "bf16"
    return arguments
