"""Takes the steps of a run: reads rows, measures, records a timeline, handles refused steps."""

import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatrain.config import TrainingSection, step_loss
from megatrain.data import Step
from megatrain.device.base import COMPUTE
from megatrain.errors import (
    DoesNotFit,
    InputError,
    MegatrainError,
    RunFailed,
    StepRefused,
    in_one_line,
)
from megatrain.run_folder.layout import TIMELINE
from megatrain.telemetry.gpu import by_driver_name, find_gpu
from megatrain.telemetry.host import process_bytes
from megatrain.telemetry.metrics import MetricsWriter, model_tflops
from megatrain.telemetry.timeline import Breakdown, Recording, StepRecorder, breakdown, chrome_trace
from megatrain.train.resume import RunState
from megatrain.train.sharing import check_rows, part_of, split_for_ranks

if TYPE_CHECKING:
    from megatrain.train.setup import Job

# By then all compilation is done.
RECORDED_STEP = 6

Result = TypeVar("Result")


class RunTimeline:
    """Records one early step of a run in `timeline.json`."""

    def __init__(self, recording: Recording, folder: Path, steps: int) -> None:
        """Args: `recording`: `Engine.recording`; `steps`: how many this process will take."""
        self._recorder, self._folder = StepRecorder(recording), folder
        # parts of the last step's time; None: that step was not recorded
        self.breakdown: Breakdown | None = None
        self._steps_left = min(RECORDED_STEP, steps)  # until the recorded step has ended

    def step(self, number: int, step: Callable[[], Result]) -> Result:
        """Take step `number` of the run; if it is the recorded one, write `timeline.json`."""
        # The updates of the step before run in the recorded step, so both steps are recorded.
        self.breakdown = None
        is_recorded = self._steps_left in (1, 2)
        if is_recorded:
            self._recorder.start()
        try:
            result = step()
        except BaseException:
            if is_recorded:  # if the run skips this step, record the next two
                self._recorder.cancel()
                self._steps_left = 2
            raise
        self._steps_left -= 1
        if is_recorded and not self._steps_left:
            spans = self._recorder.end()
            trace = chrome_trace(spans) | {"otherData": {"step": number}}
            try:
                (self._folder / TIMELINE).write_text(json.dumps(trace), encoding="utf-8")
            except OSError as error:  # a full disk costs the timeline, never the run
                log.warning("no timeline: %s", error)
            self.breakdown = breakdown(spans, COMPUTE)
        return result


_REMEMBERED = 100  # newest gradient norms, whose median is taken
_ENOUGH = 20  # norms that a median needs: the first norms of a run say little about the next
_JUMP = 10.0  # a norm of more than this times the median is computed once more

log = logging.getLogger(__name__)


class Steps:
    """Takes the steps of a run one after the other."""

    def __init__(self, job: "Job", metrics: MetricsWriter, timeline: RunTimeline) -> None:
        config = job.config
        self._job, self._metrics, self._timeline = job, metrics, timeline
        gpu = find_gpu(str(job.engine.device.torch_device))
        listed = by_driver_name(gpu.name) if gpu and config.engine.precision == "bf16" else None
        self._peak_tflops = listed and listed.bf16_tflops
        self._refusals = BadSteps(config.training)
        self._loss = step_loss(config.loss, config.rollout)
        self._recheck = config.training.recheck is not False and config.updates_wait_for_the_norm
        self.done = 0  # steps taken so far, skipped ones included
        if job.resumed is not None:
            self._refusals.load_state_dict(job.resumed.refusals)
            self.done = job.resumed.step
        self._run_file = config.model_dump(mode="json")
        self.state = self._state()  # the run's state after these steps, which a checkpoint keeps

    def take(self) -> Mapping[str, Any]:
        """Take the next step; return its record for the log.

        Raises:
            RunFailed: the step failed; the message names it and its rows. The engine's state is
                that of the step before, unless the message says otherwise.
            DoesNotFit: the device has no memory left.
        """
        step, job = self.done + 1, self._job
        assert job.engine.optimizer is not None
        lr = job.engine.optimizer.param_groups[-1]["lr"]  # Muon's last group has the matrices
        started = time.perf_counter()
        try:
            rows, tokens, logged = self._rows(step)
            result = self._take_rechecked(step, rows)
        except StepRefused as error:
            try:
                self._refusals.skip(error)
            except RunFailed as final:
                raise self._failure(step, final) from final
            outcome: dict[str, Any] = {"skipped": str(error), "rows": self._job.loader.describe()}
        except DoesNotFit as error:
            raise DoesNotFit(f"step {step}: {error}") from error
        except MegatrainError as error:
            raise self._failure(step, error) from error
        else:
            self._refusals.note_norm(result.grad_norm)
            seconds = time.perf_counter() - started
            outcome = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
            outcome |= self._rates(tokens, seconds) | result.measures | result.experts | logged
            if job.rollouts is not None:
                outcome["train_seconds"] = round(result.seconds, 6)
            if (times := self._timeline.breakdown) is not None:
                outcome |= {"busy": times.busy, "idle": times.idle}
        if step < job.total_steps:  # some schedules raise errors beyond their end
            job.schedule.step()
        self.done = step
        self.state = self._state()
        record = {"step": step, "epoch": round(job.loader.epoch, 4), **outcome}
        self._metrics.write(**record)
        return record

    def _take_rechecked(self, step: int, micro_batches: Step) -> Any:
        """Take the step; if its loss is not finite or its norm jumps, compute it once more."""

        def take(limit: float, expected: tuple[float, float] | None = None) -> Any:
            engine_step = partial(self._job.engine.step, micro_batches, self._loss)
            work = partial(engine_step, norm_limit=limit, expected=expected)
            return self._timeline.step(step, work)

        if not self._recheck:
            return take(self._refusals.norm_limit)
        try:
            return take(self._refusals.recheck_limit)
        except StepRefused as error:
            if error.measured is None:
                raise
            log.warning(
                "step %d: loss %.4g and gradient norm %.4g are out of line: the step is computed "
                "once more before that is believed", step, *error.measured,
            )  # fmt: skip
            return take(self._refusals.norm_limit, error.measured)

    def _rows(self, step: int) -> tuple[Step, int, Mapping[str, Any]]:
        """This rank's micro-batches, all ranks' number of tokens, and values for the log."""
        job = self._job
        logged: Mapping[str, Any] = {}
        try:
            if job.rollouts is not None:
                step_rows, logged = job.rollouts.take(step)
            else:
                steps: list[Step] = []  # results of `agree` would go to all ranks
                job.ranks.agree(lambda: steps.append(next(job.loader)))
                step_rows = steps[0]
            check_rows(job.ranks, step_rows)
            ranks, counted = job.engine.batch_ranks, job.engine.counts_experts
            tokens = sum(micro["input_ids"].numel() for micro in step_rows)
            rows = part_of(split_for_ranks(step_rows, ranks), ranks, counted=counted)
            if job.teacher is not None:
                started = time.perf_counter()
                rows = job.teacher.with_answers(rows)
                logged = {"teacher_seconds": round(time.perf_counter() - started, 6)}
            return rows, tokens, logged
        except (RunFailed, DoesNotFit):  # these messages name the replies that failed
            raise
        except Exception as error:
            log.error("the rows of step %d cannot be read", step, exc_info=error)
            self._metrics.write(step=step, failed=str(error))
            raise RunFailed(f"step {step}: its rows cannot be read: {error}") from error

    def _failure(self, step: int, error: MegatrainError) -> RunFailed:
        if not isinstance(error.__cause__, MegatrainError | None):
            log.error("step %d failed", step, exc_info=error.__cause__)
        rows = self._job.loader.describe()
        self._metrics.write(step=step, failed=str(error), rows=rows)
        return RunFailed(f"step {step}: {error}; its rows: {in_one_line(rows, 300)}")

    def _state(self) -> RunState:
        position = self._job.loader.state_dict()
        rollouts = {} if self._job.rollouts is None else self._job.rollouts.state_dict()
        refusals = self._refusals.state_dict()
        return RunState(self.done, position, refusals, self._run_file, rollouts=rollouts)

    def _rates(self, tokens: int, seconds: float) -> dict[str, Any]:
        """Rates and memory of a step; `tokens` counts padding, too."""
        tflops = model_tflops(*self._job.engine.computing, tokens, seconds)
        return {
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 3),
            "model_tflops": round(tflops, 6),
            "mfu": round(tflops / self._peak_tflops, 4) if self._peak_tflops else None,
            "device_peak_bytes": self._job.engine.memory()["device_peak_bytes"],
            "host_bytes": process_bytes(),
        }


class BadSteps:
    """Decides whether a step that the engine refuses is skipped, or ends the run."""

    def __init__(self, settings: TrainingSection) -> None:
        self._settings = settings
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._skipped = 0  # in a row

    @property
    def norm_limit(self) -> float:
        """The next step is refused if its gradient norm is above this."""
        return math.inf if self._settings.spike is None else self._above(self._settings.spike)

    @property
    def recheck_limit(self) -> float:
        """A step with a gradient norm above this is computed once more."""
        return min(self.norm_limit, self._above(_JUMP))

    def _above(self, times: float) -> float:
        return times * statistics.median(self._norms) if len(self._norms) >= _ENOUGH else math.inf

    def note_norm(self, grad_norm: float) -> None:
        self._norms.append(grad_norm)
        self._skipped = 0

    def skip(self, error: StepRefused) -> None:
        """Skip a refused step, if the settings allow that.

        Raises StepRefused: the settings say to stop, or the step has changed weights; RunFailed:
        too many steps in a row were skipped.
        """
        if self._settings.on_nonfinite == "stop" or not error.intact:
            raise error
        self._skipped += 1
        if self._skipped > self._settings.max_skips:
            raise RunFailed(
                f"{self._skipped} bad steps in a row (training.max_skips is "
                f"{self._settings.max_skips}), the last one: {error}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """The newest norms, and the number of steps skipped in a row, as JSON."""
        return {"norms": list(self._norms), "skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set norms and counts to those of `state_dict`. Raises InputError: they are malformed."""
        norms, skipped = state.get("norms"), state.get("skipped")
        are_floats = isinstance(norms, list) and all(isinstance(norm, float) for norm in norms)
        if not are_floats or type(skipped) is not int:
            raise InputError("the saved memory of bad steps is damaged; choose another checkpoint")
        self._norms = deque(norms or (), maxlen=_REMEMBERED)
        self._skipped = skipped
