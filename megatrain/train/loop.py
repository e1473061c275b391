"""The training loop: steps, evaluations, checkpoints, and what they leave in the run's folder."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data import Step
from megatrain.errors import MegatrainError, RunFailed, first_line, told
from megatrain.loss import num_labelled, targets_of
from megatrain.telemetry.console import TrainingProgress
from megatrain.telemetry.metrics import MetricsWriter
from megatrain.train.checkpointing import Checkpointing
from megatrain.train.finished import note_finished
from megatrain.train.folders import METRICS
from megatrain.train.opening import Finished, open_run
from megatrain.train.outputs import describe_run, draw_curve, write_model
from megatrain.train.resume import cut_metrics
from megatrain.train.setup import Job
from megatrain.train.signals import Signals
from megatrain.train.steps import Steps
from megatrain.train.timeline import RunTimeline
from megatrain.train.trackers import Trackers
from megatrain.units import duration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    `stopped`: the signal that ended it early, with the run saved. `parameters` and `memory`: of the
    engine; nothing if the run was finished before.
    """

    folder: Path
    steps: int
    parameters: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None


def train(
    config: Config, name: str, *, resume: bool = False, signals: Signals | None = None
) -> Outcome:
    """Train as `config` says and write the run's folder; `name` is part of a derived folder name.

    The folder appears when the first step can start and holds `config.yaml`, `environment.json`,
    `metrics.jsonl`, `checkpoints/`, then `timeline.json` of one early step, `loss.png`,
    `timeline.png`, `model/`, whole, and `finished.json`. With `resume` the run in `output.folder`,
    or the newest one of this name, goes on from its newest whole checkpoint; if there is none, it
    begins.
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
        with signals.interruptible():
            opened = open_run(config, name, held, resume=resume)
        if isinstance(opened, Finished):
            return Outcome(opened.folder, opened.steps)
        folder, job = opened
        try:
            return _tracked(job, config, folder, signals)
        except OSError as error:
            raise RunFailed(f"{folder}: cannot be written to or read: {told(error)}") from error


def _tracked(job: Job, config: Config, folder: Path, signals: Signals) -> Outcome:
    first = job.resumed.step if job.resumed else 0
    log.info("%s %s", f"going on after step {first} in" if first else "writing to", folder)
    with closing(Trackers(config, folder, first)) as trackers:
        return _run(job, config, folder, signals, trackers)


def _run(job: Job, config: Config, folder: Path, signals: Signals, trackers: Trackers) -> Outcome:
    first = job.resumed.step if job.resumed else 0
    describe_run(folder, config, job)
    logged = cut_metrics(folder / METRICS, first)
    metrics = MetricsWriter(folder / METRICS, also=[trackers.log])
    every, left = config.output.timeline_every, job.total_steps - first
    timeline = RunTimeline(job.engine.recording, folder, left, every)
    steps = Steps(job, config, metrics, timeline)
    saves = Checkpointing(job, folder, config.checkpoint, first)
    evaluations = _Evaluations(job, config, metrics, logged, signals)
    try:
        _loop(job.total_steps, config, steps, evaluations, saves, signals)
        stopped = signals.stop if steps.done < job.total_steps else None
        if stopped:
            saves.now(steps.state)
        else:
            with saves.rescue(lambda: steps.state):
                saves.finish()
                write_model(job, folder)
                note_finished(folder, config, steps.done)
    finally:  # pictures can be drawn at any time; whoever stops a run may have none to spare
        draw_curve(folder)
        timeline.draw()
    engine = job.engine
    return Outcome(folder, steps.done, engine.num_parameters, engine.memory(), stopped)


def _loop(
    total: int,
    config: Config,
    steps: Steps,
    evaluations: "_Evaluations",
    saves: Checkpointing,
    signals: Signals,
) -> None:
    """All steps, or those until a signal; a failure leaves what was learnt on the disk."""
    progress = TrainingProgress(total, config.output.log_every, done=steps.done)
    try:
        with progress, saves.rescue(lambda: steps.state):
            evaluations.after(steps.done, total, progress.say)  # a kill may have come before it
            while steps.done < total and not signals.stop:
                progress.step(steps.take())
                last = steps.done == total
                saves.after(steps.state, asked=signals.take_save(), last=last)
                evaluations.after(steps.done, total, progress.say)
    except MegatrainError:
        raise
    except Exception as error:
        # Ctrl-C in a terminal also ends a compiler that the step waits for.
        if not signals.stop or saves.saved != steps.done:
            raise
        log.warning("the running step is given up: %s", first_line(error))


class _Evaluations:
    """Those of a run; each is done once, however often the run is resumed.

    A signal ends one that is not the last: it is made up for when the run goes on.
    """

    def __init__(
        self,
        job: Job,
        config: Config,
        metrics: MetricsWriter,
        logged: Sequence[Mapping[str, Any]],
        signals: Signals,
    ) -> None:
        self._engine, self._metrics, self._signals = job.engine, metrics, signals
        # As many rows at once as a step has: more would take memory that no plan counts.
        at_once = max(1, config.training.batch_size // job.loader.rows_per_micro_batch)
        rows = job.evaluation
        parts = [rows[start : start + at_once] for start in range(0, len(rows), at_once)]
        counted = [(part, _labelled(part)) for part in parts]
        self._parts = [each for each in counted if each[1]] or counted[:1]  # which is refused
        self._every = config.training.eval_every
        self._done = {record["step"] for record in logged if "eval_loss" in record}

    def after(self, step: int, total: int, say: Callable[[str], None]) -> None:
        """Evaluate if it is due after `step`."""
        due = step == total or (self._every is not None and step > 0 and step % self._every == 0)
        if not (due and self._parts) or step in self._done:
            return
        started = time.perf_counter()
        loss = self._loss(last=step == total)
        if loss is None:
            return
        seconds = time.perf_counter() - started
        self._metrics.write(step=step, eval_loss=loss, eval_seconds=round(seconds, 4))
        say(f"step {step}/{total}  evaluation loss {loss:.4f}  {duration(seconds)}")

    def _loss(self, *, last: bool) -> float | None:
        """The mean over all labelled tokens; None: given up."""
        sums = []
        for part, count in self._parts:
            if self._signals.stop and not last:
                return None
            sums.append(self._engine.evaluate(part) * count)
        return sum(sums) / sum(count for _, count in self._parts)


def _labelled(step: Step) -> int:
    return sum(num_labelled(targets_of(micro["labels"])) for micro in step)
