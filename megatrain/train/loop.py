"""The training loop: steps, evaluations, checkpoints, and what they leave in the run's folder."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain.config import Config
from megatrain.errors import InputError, MegatrainError, RunFailed, first_line, told
from megatrain.parallel.distributed import Ranks
from megatrain.parallel.launch import joined
from megatrain.run_folder.finished import note_finished
from megatrain.run_folder.layout import METRICS, checkpoints
from megatrain.telemetry.console import TrainingProgress
from megatrain.telemetry.metrics import MetricsWriter, is_evaluation
from megatrain.train.callbacks import Callbacks, names_of
from megatrain.train.checkpointing import Checkpointing
from megatrain.train.evaluations import Evaluations
from megatrain.train.opening import Finished, open_run
from megatrain.train.outputs import (
    Devices,
    describe_run,
    draw_curve,
    show_run,
    write_model,
    write_saved_model,
)
from megatrain.train.resume import RunState, cut_metrics
from megatrain.train.schedule import schedule_state
from megatrain.train.setup import Job
from megatrain.train.sharing import check_shared, from_first
from megatrain.train.signals import Signals
from megatrain.train.steps import Steps
from megatrain.train.timeline import RunTimeline
from megatrain.train.trackers import Trackers
from megatrain.train.watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    `stopped`: the signal that ended it early, with the run saved. `parameters` and `memory`: of the
    engine; nothing if the run was finished before. `early`: why it ended before its last step.
    `best`: of which state the model is, where that is not the last.
    """

    folder: Path
    steps: int
    parameters: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None
    early: str | None = None
    best: str | None = None


def train(
    config: Config,
    name: str,
    *,
    resume: bool = False,
    signals: Signals | None = None,
    callbacks: Sequence[Any] = (),
) -> Outcome:
    """Train as `config` says and write the run's folder; `name` is part of a derived folder name.

    The folder appears when the first step can start and holds `config.yaml`, `environment.json`,
    `metrics.jsonl`, `checkpoints/`, then `timeline.json` of one early step, `model/`, whole,
    `finished.json`, `loss.png`, `timeline.png` and `report.html`. With `resume` the run in
    `output.folder`, or the newest one of this name, goes on from its newest whole checkpoint; if
    there is none, it begins.
    Whoever listens to signals already gives them; else they are listened to here.

    Raises:
        InputError: configuration, data, model or checkpoint cannot be used; nothing was written.
        DoesNotFit: more memory is needed than there is; a run that had begun is saved.
        RunFailed: a step could not be done; the message names it and its rows. The state before
            it is saved.
        Stopped: a signal came before the first step; nothing was written.
    """
    with ExitStack() as held:
        signals = signals or held.enter_context(Signals())
        ranks = held.enter_context(joined())
        check_shared(config, ranks, callbacks=names_of(callbacks))
        config = _as_started(config, ranks)
        if ranks.rank:  # what a run says is said once
            logging.getLogger("megatrain").setLevel(logging.ERROR)
            config = config.model_copy(update={"tracking": type(config.tracking)()})
        with signals.interruptible():
            opened = open_run(config, name, held, resume=resume, ranks=ranks)
        if isinstance(opened, Finished):
            return Outcome(opened.folder, opened.steps, early=opened.early)
        folder, job = opened
        try:
            return _run(job, config, folder, signals, callbacks)
        except OSError as error:
            raise RunFailed(f"{folder}: cannot be written to or read: {told(error)}") from error


def _as_started(config: Config, ranks: Ranks) -> Config:
    """The configuration with the devices of this host that take part, as torchrun has started them.

    Raises:
        InputError: more are wanted than this process.
    """
    if ranks.size == 1 and config.engine.devices > 1:
        raise InputError(
            f"engine.devices is {config.engine.devices}, and this is one process: start the run "
            f"with megatrain train, or this script with torchrun --nproc-per-node "
            f"{config.engine.devices}; or set engine.devices to 1"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)) if ranks.size > 1 else 1
    engine = config.engine.model_copy(update={"devices": here})
    return config.model_copy(update={"engine": engine})


class _Run:
    """The parts of a run, and what is done after each of its steps."""

    def __init__(
        self,
        job: Job,
        config: Config,
        folder: Path,
        signals: Signals,
        trackers: Trackers,
        callbacks: Callbacks,
    ) -> None:
        self._job, self._config, self._folder = job, config, folder
        self.signals, self.callbacks = signals, callbacks
        first = job.resumed.step if job.resumed else 0
        devices = Devices.of(job)
        logged = from_first(job.ranks, lambda: _begin_log(folder, config, job, devices, first))
        path = Path(os.devnull) if job.ranks.rank else folder / METRICS
        metrics = MetricsWriter(path, also=[trackers.log])
        every, left = config.output.timeline_every, job.total_steps - first
        recorded = (0, None) if job.ranks.rank else (left, every)
        self.timeline = RunTimeline(job.engine.recording, folder, *recorded)
        self.steps = Steps(job, config, metrics, self.timeline)
        self.watch = Watch(config, ())
        self.checkpoints = Checkpointing(
            job, folder, config.checkpoint, first, self.best_kept, callbacks.saved
        )
        self.evaluations = Evaluations(job, config, metrics, logged, signals)
        self._logged = logged

    @property
    def state(self) -> RunState:
        """What a checkpoint keeps of the run beside the engine's state."""
        job, steps = self._job, self.steps
        schedule = schedule_state(job.schedule, job.total_steps, steps.done)
        return replace(steps.state, callbacks=self.callbacks.state_dict(), schedule=schedule)

    @property
    def early(self) -> str | None:
        """Why the run ends before its last step; None: it does not."""
        return self.watch.stop or ("a callback asked for it" if self.callbacks.stop else None)

    @property
    def _is_last(self) -> bool:
        return self.steps.done == self._job.total_steps or self.callbacks.stop

    def best_kept(self) -> int | None:
        """The step of the best state that has a checkpoint; None: nobody asked for it."""
        if self._config.checkpoint.best is None:
            return None
        return self.watch.best_of(checkpoints(self._folder))

    def take_steps(self) -> None:
        """All steps, or those until an early end; a failure leaves what was learnt on the disk."""
        total = self._job.total_steps
        console = Console(quiet=True) if self._job.ranks.rank else None
        every, done = self._config.output.log_every, self.steps.done
        progress = TrainingProgress(total, every, console, done=done)
        self.signals.share(self._job.ranks)
        try:
            with progress, self.checkpoints.rescue(lambda: self.state):
                self.callbacks.begin(self._logged)
                for record in self._logged:  # the last one may have come after the save
                    if is_evaluation(record):
                        self._heed(record)
                self._evaluate(progress.say)  # a kill may have come before it
                while self.steps.done < total and not (self.signals.stop or self.early):
                    self._step(progress)
        except MegatrainError:
            raise
        except Exception as error:
            # Ctrl-C in a terminal also ends a compiler that the step waits for.
            if not self.signals.stop or self.checkpoints.saved != self.steps.done:
                raise
            log.warning("the running step is given up: %s", first_line(error))

    def _step(self, progress: TrainingProgress) -> None:
        self.callbacks.step_begins()
        record = self.steps.take()
        self.evaluations.trained(record)
        progress.step(record)
        self.callbacks.step(record)
        self.signals.share(self._job.ranks)
        self._save_and_evaluate(progress.say)
        if self.callbacks.epoch(more=not (self._is_last or self.signals.stop or self.early)):
            self._save_and_evaluate(progress.say)  # what they asked for at its end

    def _save_and_evaluate(self, say: Callable[[str], None]) -> None:
        asked = self.signals.take_save() | self.callbacks.take("should_save")
        self.checkpoints.after(self.state, asked=asked, last=self._is_last)
        self._evaluate(say)

    def _evaluate(self, say: Callable[[str], None]) -> None:
        asked = self.callbacks.take("should_evaluate")
        step = self.steps.done
        record = self.evaluations.after(step, say, final=self._is_last, asked=asked)
        if record is None:
            return
        if self._heed(record) and self._config.checkpoint.best is not None:
            self.checkpoints.keep_best(self.state)
        asked = self.callbacks.take("should_save")
        if asked or self.early:
            self.checkpoints.after(self.state, asked=asked, last=self.early is not None)

    def _heed(self, record: Mapping[str, Any]) -> bool:
        """Take an evaluation in; whether it is of the best state so far."""
        self.callbacks.evaluated(record)
        is_best, step = self.watch.see(record), record["step"]
        if is_best:
            self.callbacks.found_best(step, self.watch.value(step))
        return is_best

    def finish(self) -> str | None:
        """Write the model, and of which state it is; returns that where it is not the last."""
        steps, config, best = self.steps.done, self._config, None
        with self.checkpoints.rescue(lambda: self.state):
            self.checkpoints.finish()
            kept = from_first(self._job.ranks, self.best_kept)
            wanted = kept if config.checkpoint.load_best else steps
            if wanted is None:
                log.warning("no evaluated state has a checkpoint: the model is that of the last")
            elif config.checkpoint.load_best:
                best_of_all, value = self.watch.ranked[0], self.watch.value
                if value(best_of_all) != value(wanted):
                    log.warning("the state of step %d was better, but is not kept", best_of_all)
            if wanted in (None, steps):
                write_model(self._job, self._folder)
            elif self._job.ranks.rank == 0:
                write_saved_model(self._job, self._folder, wanted)
            if wanted is not None and config.checkpoint.load_best:
                best = {"step": wanted, config.watched: self.watch.value(wanted)}
            if self._job.ranks.rank == 0:
                note_finished(self._folder, config, steps, best=best, early=self.early)
        if best is None or wanted == steps:
            return None
        return f"step {wanted}, the best ({config.watched} {best[config.watched]:.4g}),"


def _begin_log(
    folder: Path, config: Config, job: Job, devices: Devices, first: int
) -> list[Mapping[str, Any]]:
    describe_run(folder, config, job, devices)
    return cut_metrics(folder / METRICS, first)


def _run(
    job: Job, config: Config, folder: Path, signals: Signals, callbacks: Sequence[Any]
) -> Outcome:
    first = job.resumed.step if job.resumed else 0
    log.info("%s %s", f"going on after step {first} in" if first else "writing to", folder)
    told = Callbacks(callbacks, job, config, folder)
    with closing(Trackers(config, folder, first)) as trackers:
        run, best = _Run(job, config, folder, signals, trackers, told), None
        try:
            run.take_steps()
            done = run.steps.done == job.total_steps or run.early is not None
            if stopped := None if done else signals.stop:
                run.checkpoints.now(run.state)
            else:
                best = run.finish()
            told.end()
        finally:  # pictures can be drawn at any time; whoever stops a run may have none to spare
            if job.ranks.rank == 0:
                draw_curve(folder)
                run.timeline.draw()
                show_run(folder)
    engine, early = job.engine, run.early if run.steps.done < job.total_steps else None
    return Outcome(
        folder, run.steps.done, engine.num_parameters, engine.memory(), stopped, early, best
    )
