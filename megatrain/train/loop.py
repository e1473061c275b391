"""Trains a run in its folder: begins or resumes it, takes its steps, evaluates, saves, ends it."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain import config as run_files
from megatrain.base.json_yaml import read_yaml
from megatrain.base.whole_files import flush, whole_folder, write_file
from megatrain.checkpoint import Saving, open_checkpoint, put_right, rotate
from megatrain.config import Config
from megatrain.data import PackedDataset
from megatrain.data.preview import samples
from megatrain.errors import (
    InputError,
    MegatrainError,
    RunFailed,
    StepRefused,
    explained,
    in_one_line,
    os_reason,
)
from megatrain.parallel.distributed import Ranks, joined, local_rank
from megatrain.report import write_report
from megatrain.run_folder import layout
from megatrain.source.write_model import write_saved
from megatrain.telemetry.console import TrainingProgress
from megatrain.telemetry.host import environment
from megatrain.telemetry.metrics import Listener, MetricsWriter
from megatrain.train import resume as resuming
from megatrain.train.evaluations import Evaluations, Watch
from megatrain.train.resume import RunState
from megatrain.train.setup import Job, prepare
from megatrain.train.sharing import check_folder, check_shared
from megatrain.train.signals import Signals
from megatrain.train.steps import RunTimeline, Steps
from megatrain.train.trackers import Trackers, check_trackers

_RETRY_AFTER = 10  # steps after which a checkpoint that could not be written is tried again
log = logging.getLogger(__name__)


@dataclass
class Checkpointing:
    """Saves a run's state while training goes on, one checkpoint at a time.

    A checkpoint that cannot be written causes a warning, and another attempt some steps later: the
    checkpoint before it is still whole.
    """

    job: Job
    saved: int  # the step of the newest whole checkpoint, 0 if there is none
    best: Callable[[], int | None]  # the step of the best saved state, whose checkpoint is kept
    _running: tuple[int, Saving] | None = None
    _retry: int | None = None  # the step after which a failed save is tried again
    _keep_next: bool = False  # the next checkpoint is never deleted

    def after(self, state: RunState, *, asked: bool, last: bool) -> None:
        """Start a checkpoint if due or asked for, after an earlier one; `last`: no step follows."""
        every, step = self.job.config.checkpoint.every, state.step
        due = self.job.config.checkpoint.at_end if last else every is not None and step % every == 0
        retries = self._retry is not None and step >= self._retry
        newest = self.saved if self._running is None else self._running[0]
        starts = (due or asked or retries) and step != newest
        self.settle(wait=starts or last)
        if starts:
            self._keep_next |= due and self._is_marked(step)
            self._retry = None
            try:
                self._running = step, self._save(state)
            except (MegatrainError, OSError) as error:
                self._failed(step, error)

    def save_now(self, state: RunState) -> None:
        """Save this state and wait until it is written. Raises RunFailed: that is impossible."""
        self.settle(wait=True)
        if self.saved == state.step:
            return
        problem = f"{self.job.folder}: step {state.step} cannot be saved"
        with explained(problem, of=(InputError, OSError), into=RunFailed):
            self._save(state).wait()
        self._note_whole(state.step)

    @contextmanager
    def rescue(self, state: Callable[[], RunState]) -> Iterator[None]:
        """If the block raises an error, save the state if possible; then let the error go on."""
        try:
            yield
        except Exception as error:
            if self.job.ranks.size == 1 or _is_on_all_ranks(error):
                self._rescue(state())
            raise

    def _rescue(self, state: RunState) -> None:
        try:
            self.save_now(state)
            if state.step:
                log.info("the state after step %d is saved; --resume goes on there", state.step)
        except Exception as error:
            older = f"; --resume goes on after step {self.saved}" if self.saved else ""
            log.warning("the state before the failure is not saved: %s%s", error, older)

    def _save(self, state: RunState) -> Saving:
        with suppress(OSError):  # after a power failure the log must have the checkpoint's steps
            flush(self.job.folder / layout.METRICS)
        return self.job.engine.save(
            layout.checkpoint_folder(self.job.folder, state.step),
            extra=dict(vars(state)),
            attach=self.job.write_tokenizer,
            keep=self._keep_next or self._is_marked(state.step),
            wait=False,
        )

    def _is_marked(self, step: int) -> bool:
        """True if the checkpoint after this step is never deleted (`checkpoint.keep_every`)."""
        every = self.job.config.checkpoint.keep_every
        return every is not None and step % every == 0

    def settle(self, *, wait: bool) -> None:
        """Note that the checkpoint being written, if any, has ended; `wait`: wait for its end."""
        if self._running is None:
            return
        if not wait and not all(self.job.ranks.all_gather_object(self._running[1].done)):
            return
        (step, saving), self._running = self._running, None
        try:
            saving.wait()
        except MegatrainError as error:
            self._failed(step, error)
            return
        self._keep_next = False
        self._note_whole(step)

    def _note_whole(self, step: int) -> None:
        """Count this step's checkpoint as the newest, and delete checkpoints beyond `keep`."""
        self.saved, keep = step, self.job.config.checkpoint.keep
        if not self.job.ranks.rank and len(layout.checkpoints(self.job.folder)) > keep:
            try:
                newest, best = layout.checkpoint_folder(self.job.folder, step), self.best()
                spared = [] if best is None else [layout.checkpoint_folder(self.job.folder, best)]
                rotate(self.job.folder / layout.CHECKPOINTS, keep, newest=newest, spared=spared)
            except OSError as error:
                log.warning("an old checkpoint cannot be deleted: %s", error)

    def _failed(self, step: int, error: Exception) -> None:
        """Warn that a step's checkpoint could not be written, and set when to try again."""
        retry = self._retry = step + _RETRY_AFTER
        when = f" and tries again after step {retry}" if retry <= self.job.total_steps else ""
        log.warning("%s; the run goes on%s", error, when)


def _is_on_all_ranks(error: BaseException | None) -> bool:
    """True if all ranks raise this error, so that they can save together."""
    if not isinstance(error, MegatrainError):
        return False
    return error.by_all or isinstance(error, StepRefused) or _is_on_all_ranks(error.__cause__)


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    `parameters`, `memory`: those of the engine; empty if the run had ended before. `stopped`: the
    signal that stopped the run, which is saved. `early`: the reason for an end before the last
    step. `best`: words for the state of the model, unless it is the last state.
    """

    folder: Path
    steps: int
    parameters: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None
    early: str | None = None
    best: str | None = None


def run(
    what: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Any] = (),
    on_record: Listener | None = None,
    resume: bool = False,
) -> Outcome:
    """Train as `megatrain train` does; raises its errors.

    Args:
        what: a run file, its content, or (with `resume`) the folder of a run.
        overrides: `path.to.key=value`.
        callbacks: refused: StreamedTrainer calls transformers' TrainerCallbacks, a run does not.
        on_record: called on rank 0 with each record, once its line of `metrics.jsonl` is written.
        resume: go on with an earlier run, if there is one.
    """
    if callbacks:
        raise InputError(
            "callbacks: a run calls none; give on_record a function of each record of the log, or "
            "train with megatrain.integrations.StreamedTrainer, which calls them as Trainer does"
        )
    if isinstance(overrides, str):
        raise InputError(f"overrides is {overrides!r}; give a list: [{overrides!r}]")
    if not isinstance(what, Mapping):
        config, name = layout.load_run(Path(what), overrides, resume=resume), Path(what).stem
    elif overrides:
        raise InputError("overrides are for run files; change the mapping")
    else:
        config, name = run_files.validate(what, "the run"), "run"
    return train(config, name, resume=resume, on_record=on_record)


def train(
    config: Config,
    name: str,
    *,
    resume: bool = False,
    signals: Signals | None = None,
    on_record: Listener | None = None,
) -> Outcome:
    """Train as `config` says and write the run's folder.

    The folder appears when the first step can start; docs/training.md describes its files. `name`
    is part of its name if `output.folder` is not set. With `resume` the run in `output.folder`, or
    the newest one of this name, goes on from its newest whole checkpoint, if there is one.
    `signals`: the caller's, if it handles them already. `on_record`: called with each record.

    Raises InputError, or Stopped by a signal: nothing was written; DoesNotFit, RunFailed: the state
    of a run that had begun is saved.
    """
    with ExitStack() as stack:
        signals = signals or stack.enter_context(Signals())
        ranks = stack.enter_context(joined())
        check_shared(config, ranks)
        config = _as_started(config, ranks)
        if ranks.rank:  # only the first rank logs
            logging.getLogger("megatrain").setLevel(logging.ERROR)
            config = config.model_copy(update={"tracking": type(config.tracking)()})
        with signals.interruptible():
            check_trackers(config)
            job = _open(config, name, stack, ranks, resume=resume)
        if isinstance(job, Path):  # the folder of a run that has ended
            ending = layout.ending(job)
            return Outcome(job, ending.done or 0, early=ending.early)
        try:
            return _run(job, signals, on_record)
        except OSError as error:
            message = f"{job.folder}: cannot be written to or read: {os_reason(error)}"
            raise RunFailed(message) from error


def _open(config: Config, name: str, stack: ExitStack, ranks: Ranks, *, resume: bool) -> Job | Path:
    """Lock a run's folder and prepare its next step; returns the folder if the run has ended."""
    output = config.output.folder
    earlier_run = ranks.from_first(lambda: layout.run_to_resume(output, name) if resume else None)
    if earlier_run is not None:
        return _open_earlier(earlier_run, config, stack, ranks)
    ranks.from_first(lambda: layout.new_run_folder(output, name))  # raises early if it is bad
    if resume:
        log.info("no earlier run of that name: this one begins")
    job = prepare(config, stack, ranks=ranks)

    def make_folder() -> Path:
        folder = layout.make_run_folder(output, name)
        stack.enter_context(layout.locked(folder))
        layout.require_empty(folder, of_run=True)  # another run may have used it meanwhile
        return folder

    job.folder = ranks.from_first(make_folder)
    check_folder(ranks, job.folder)
    return job


def _open_earlier(folder: Path, config: Config, stack: ExitStack, ranks: Ranks) -> Job | Path:
    ranks.from_first(lambda: stack.enter_context(layout.locked(folder)))
    check_folder(ranks, folder)
    if layout.finished_steps(folder, config) is not None:
        resuming.check_config(config, read_yaml(folder / layout.CONFIG), folder / layout.CONFIG)
        return folder
    layout.require_folder(folder / layout.CHECKPOINTS)
    ranks.from_first(lambda: put_right(folder / layout.CHECKPOINTS))
    job = _resume(folder, config, stack, ranks)
    job.folder = folder
    return job


def _resume(folder: Path, config: Config, stack: ExitStack, ranks: Ranks) -> Job:
    """Prepare a run from its newest whole checkpoint; damaged tiles show when they are read."""
    for start in resuming.find_starts(folder, config):
        resuming.say_differences(config, start.state)
        try:
            return prepare(config, stack, start, ranks)
        except resuming.Damaged as error:
            log.warning("not resumed from: %s", error)
    if layout.checkpoints(folder):
        raise InputError(f"{folder}: none of its checkpoints is whole; start a new run")
    if (folder / layout.MODEL).exists():
        raise InputError(f"{folder}: a finished run without checkpoints; start a new run")
    log.info("%s has no checkpoint yet: the run begins anew", folder)
    return prepare(config, stack, ranks=ranks)


def _as_started(config: Config, ranks: Ranks) -> Config:
    """The configuration with `devices` set to the number of ranks that run on this host."""
    if ranks.size == 1 and config.engine.devices > 1:
        raise InputError(
            f"engine.devices is {config.engine.devices}, and this is one process: start it with "
            "megatrain train, or torchrun --nproc-per-node; or set engine.devices to 1"
        )
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)) if ranks.size > 1 else 1
    engine = config.engine.model_copy(update={"devices": on_this_host})
    return config.model_copy(update={"engine": engine})


def _run(job: Job, signals: Signals, on_record: Listener | None) -> Outcome:
    folder = job.folder
    done = job.resumed.step if job.resumed else 0
    log.info("%s %s", f"going on after step {done} in" if done else "writing to", folder)
    with closing(Trackers(job.config, folder, done)) as trackers:
        run = _Run(job, signals, [trackers.log, *([on_record] if on_record else [])], done)
        best = None
        try:
            run.take_steps()
            has_ended = run.is_last or run.watch.stop is not None
            stopped = None if has_ended else signals.stop
            if stopped is not None:
                run.checkpoints.save_now(run.steps.state)
            else:
                best = run.finish()
        finally:
            if job.ranks.rank == 0:
                draw(folder)
    early = None if run.is_last else run.watch.stop
    num_parameters, memory = job.engine.num_parameters, job.engine.memory()
    return Outcome(folder, run.steps.done, num_parameters, memory, stopped, early, best)


class _Run:
    """The parts of a run, and what is done after each of its steps."""

    def __init__(
        self, job: Job, signals: Signals, listeners: Sequence[Listener], done: int
    ) -> None:
        self._job, self._config, self._folder = job, job.config, job.folder
        self._signals = signals
        is_rank_0 = job.ranks.rank == 0
        device = str(job.engine.device.torch_device), not local_rank(job.ranks.host)
        devices = job.ranks.all_gather_object(device)
        job.ranks.from_first(lambda: describe_run(job, devices))
        log_file = self._folder / layout.METRICS
        logged = job.ranks.from_first(lambda: resuming.cut_metrics(log_file, done))
        if not is_rank_0:
            log_file = Path(os.devnull)
        metrics = MetricsWriter(log_file, also=listeners if is_rank_0 else [])
        steps_left = job.total_steps - done if is_rank_0 else 0
        timeline = RunTimeline(job.engine.recording, self._folder, steps_left)
        self.steps = Steps(job, metrics, timeline)
        self.watch = Watch(self._config, logged)
        self.checkpoints = Checkpointing(job, done, self.best_saved_step)
        self.evaluations = Evaluations(job, metrics, logged, signals)

    @property
    def is_last(self) -> bool:
        return self.steps.done == self._job.total_steps

    def best_saved_step(self) -> int | None:
        """The step of the best state with a checkpoint; None: there is none, or none is wanted."""
        if self._config.checkpoint.best is None:
            return None
        checkpoints = layout.checkpoints(self._folder)
        return next((step for step in self.watch.ranked if step in checkpoints), None)

    def take_steps(self) -> None:
        """Take all steps, or those until an early end; a failure saves the state first."""
        total = self._job.total_steps
        console = Console(quiet=True) if self._job.ranks.rank else None
        every = self._config.output.log_every
        progress = TrainingProgress(total, every, console, done=self.steps.done)
        self._signals.share(self._job.ranks)
        try:
            with progress, self.checkpoints.rescue(lambda: self.steps.state):
                self._evaluate(progress.say)  # an evaluation that a kill may have prevented
                while not (self.is_last or self._signals.stop or self.watch.stop):
                    self._step(progress)
        except MegatrainError:
            raise
        except Exception as error:
            # Ctrl-C in a terminal also kills a compiler that the step waits for.
            if not self._signals.stop or self.checkpoints.saved != self.steps.done:
                raise
            log.warning("the running step is given up: %s", in_one_line(error, 200))

    def _step(self, progress: TrainingProgress) -> None:
        record = self.steps.take()
        self.evaluations.see(record)
        progress.step(record)
        self._signals.share(self._job.ranks)
        asked = self._signals.take_save()
        self.checkpoints.after(self.steps.state, asked=asked, last=self.is_last)
        self._evaluate(progress.say)

    def _evaluate(self, say: Callable[[str], None]) -> None:
        record = self.evaluations.after(self.steps.done, say, final=self.is_last)
        if record is None:
            return
        if self.watch.see(record) and self._config.checkpoint.best is not None:
            self.checkpoints.after(self.steps.state, asked=True, last=False)
        if self.watch.stop is not None:
            self.checkpoints.after(self.steps.state, asked=False, last=True)

    def finish(self) -> str | None:
        """Write the model; return words for its state, or None if it is the last state."""
        steps, config = self.steps.done, self._config
        best = None
        with self.checkpoints.rescue(lambda: self.steps.state):
            self.checkpoints.settle(wait=True)
            best_step = self._job.ranks.from_first(self.best_saved_step)
            step = best_step if config.checkpoint.load_best else None
            if step is not None:
                value = self.watch.value(step)
                best = {"step": step, config.watched: value}
                best_of_all = self.watch.ranked[0]
                if self.watch.value(best_of_all) != value:
                    log.warning("the state of step %d was better, but is not kept", best_of_all)
            elif config.checkpoint.load_best:
                log.warning("no evaluated state has a checkpoint: the model is that of the last")
            write_model(self._job, None if step == steps else step)
            if self._job.ranks.rank == 0:
                layout.note_finished(self._folder, config, steps, best=best, early=self.watch.stop)
        if best is None or step == steps:
            return None
        return f"step {step}, the best ({config.watched} {best[config.watched]:.4g}),"


def describe_run(job: Job, devices: Sequence[tuple[str, bool]]) -> None:
    """Write the resolved configuration, which marks the folder as a run's, and the machine's data.

    Args: `devices`: for each rank the name of its device, and True if it is its host's first rank.
    """
    write_file(job.folder / layout.CONFIG, job.config.as_yaml())
    data = job.loader.dataset
    record = environment(devices[0][0]) | {
        "devices": [name for name, _ in devices],
        "ranks": len(devices),
        "hosts": sum(is_first for _, is_first in devices),
        "parameters": job.engine.num_parameters,
        "trained_parameters": job.engine.num_trained,
        "computing": job.engine.computing,
        "placement": job.engine.placement.as_dict(),
        "disk_bytes": job.engine.memory()["disk_bytes"],
        "data": data.kind,
    }
    write_file(job.folder / layout.ENVIRONMENT, json.dumps(record, indent=2) + "\n")
    if isinstance(data, PackedDataset) and data.has_images:
        content = {"samples": samples(data, job.tokenizer)}
        write_file(job.folder / layout.SAMPLES, json.dumps(content) + "\n")
    if job.references is not None:
        job.references.write(job.folder)


def write_model(job: Job, step: int | None) -> None:
    """Write the model and its tokenizer, whole or not at all; replace an earlier model.

    Args: `step`: write the model of this step's checkpoint; None: the current one.
    """
    folder = job.folder / layout.MODEL
    if job.ranks.rank:
        if step is None:
            job.engine.save_pretrained(folder)  # takes part in what rank 0 writes
        return
    with whole_folder(folder, replace=True) as partial:
        if step is None:
            job.engine.save_pretrained(partial)
        else:
            best = open_checkpoint(layout.checkpoint_folder(job.folder, step))
            write_saved(best, partial, trust_remote_code=job.config.model.trust_remote_code)
        job.write_tokenizer(partial)


def draw(run: Path) -> None:
    """Write a run's report page and pictures; an error only causes a warning."""
    try:
        write_report(run, pictures=True)
    except Exception as error:  # `megatrain report` can write them at any time
        log.warning("no report.html, or a picture is missing: %s", error)
