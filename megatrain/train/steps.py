"""One step of a run: its rows, its measurements, and what is done when it goes wrong."""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatrain.api import Engine
from megatrain.config import Config, step_loss
from megatrain.data import Step
from megatrain.errors import DoesNotFit, MegatrainError, RunFailed, StepRefused
from megatrain.telemetry.flops import model_tflops
from megatrain.telemetry.gpu import bf16_peak_tflops, find_gpu
from megatrain.telemetry.memory import process_bytes
from megatrain.telemetry.metrics import MetricsWriter
from megatrain.train.bad_steps import BadSteps
from megatrain.train.resume import RunState
from megatrain.train.setup import Job
from megatrain.train.sharing import by_all, check_rows, enough, part_of
from megatrain.train.timeline import RunTimeline

log = logging.getLogger(__name__)


class Steps:
    """Takes the steps of a run one after the other.

    Attributes:
        done: steps taken so far, skipped ones included.
        state: what a checkpoint keeps of the run after those, beside the engine's state.
    """

    def __init__(
        self, job: Job, config: Config, metrics: MetricsWriter, timeline: RunTimeline
    ) -> None:
        self._job, self._metrics, self._timeline = job, metrics, timeline
        self._meter = Meter(job.engine, config.engine.precision)
        self._refusals = BadSteps(config.training)
        self._loss = step_loss(config.loss, config.rollout)
        self._recheck = config.training.recheck is not False and config.updates_wait_for_the_norm
        self.done = 0
        if job.resumed is not None:
            self._refusals.load_state_dict(job.resumed.refusals)
            self.done = job.resumed.step
        self._settled = config.model_dump(mode="json")
        self.state = self._state()

    def take(self) -> Mapping[str, Any]:
        """The next step; returns the line that it has in the log.

        Raises:
            RunFailed: it could not be done; the message names it and its rows. The engine's state
                is that of the step before, unless the message says otherwise.
            DoesNotFit: the device has no memory left.
        """
        step, job = self.done + 1, self._job
        assert job.engine.optimizer is not None
        lr = job.engine.optimizer.param_groups[-1]["lr"]  # of matrices, where Muon has two rates
        started = time.perf_counter()
        made: Mapping[str, Any] = {}
        try:
            own, tokens, made = self._rows(step)
            result = self._measured(step, own)
        except StepRefused as error:
            outcome = self._left_out(step, error)
        except DoesNotFit as error:
            raise DoesNotFit(f"step {step}: {error}") from error
        except MegatrainError as error:
            raise self._failure(step, error) from error
        else:
            self._refusals.passed(result.grad_norm)
            seconds = time.perf_counter() - started
            measured = self._meter.measure(tokens, seconds)
            outcome = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, **measured}
            outcome |= result.measures | made
            if job.rollouts is not None:
                outcome["train_seconds"] = round(result.seconds, 6)
            if (times := self._timeline.breakdown) is not None:
                outcome |= {"busy": times.busy, "idle": times.idle}
        if step < job.total_steps:  # a schedule need not be defined beyond its end
            job.schedule.step()
        self.done = step
        self.state = self._state()
        record = {"step": step, "epoch": round(job.loader.epoch, 4), **outcome}
        self._metrics.write(**record)
        return record

    def _measured(self, step: int, micro_batches: Step) -> Any:
        """Take the step; where loss or norm jump, only if they do so twice."""

        def take(limit: float, expected: tuple[float, float] | None = None) -> Any:
            work = partial(self._job.engine.step, micro_batches, self._loss)
            return self._timeline.step(step, lambda: work(norm_limit=limit, expected=expected))

        if not self._recheck:
            return take(self._refusals.norm_limit)
        try:
            return take(self._refusals.believed)
        except StepRefused as error:
            if error.measured is None:
                raise
            log.warning(
                "step %d: loss %.4g and gradient norm %.4g are out of line: the step is computed "
                "once more before that is believed", step, *error.measured,
            )  # fmt: skip
            return take(self._refusals.norm_limit, error.measured)

    def _rows(self, step: int) -> tuple[Step, int, Mapping[str, Any]]:
        """Micro-batches of this rank, tokens of all, and what the log has of their making."""
        job, made = self._job, {}  # type: ignore[var-annotated]
        try:
            if job.rollouts is not None:
                rows, made = job.rollouts.take(step)
            else:
                rows = by_all(job.ranks, lambda: next(job.loader))
            check_rows(job.ranks, rows)
            each, counted = job.engine.batch_ranks, job.engine.balances_experts
            tokens, rows = _tokens(rows), enough(rows, each)
            own = part_of(rows, each, counted=counted)
            if job.second is not None:
                own, made = job.second.beside(own)
            return own, tokens, made
        except (RunFailed, DoesNotFit):  # of replies that were to be made
            raise
        except Exception as error:
            log.error("the rows of step %d cannot be read", step, exc_info=error)
            self._metrics.write(step=step, failed=str(error))
            raise RunFailed(f"step {step}: its rows cannot be read: {error}") from error

    def _left_out(self, step: int, error: StepRefused) -> dict[str, Any]:
        try:
            self._refusals.skip(error)
        except RunFailed as final:
            raise self._failure(step, final) from final
        return {"skipped": str(error), "rows": self._places()}

    def _failure(self, step: int, error: MegatrainError) -> RunFailed:
        if not isinstance(error.__cause__, MegatrainError | None):
            log.error("step %d failed", step, exc_info=error.__cause__)
        rows = self._places()
        self._metrics.write(step=step, failed=str(error), rows=rows)
        return RunFailed(f"step {step}: {error}; its rows: {_short(rows)}")

    def _places(self) -> str:
        """Where the rows of the running step come from."""
        return self._job.loader.describe().partition(": ")[2]

    def _state(self) -> RunState:
        position = self._job.loader.state_dict()
        rollouts = {} if self._job.rollouts is None else self._job.rollouts.state_dict()
        refusals = self._refusals.state_dict()
        return RunState(self.done, position, refusals, self._settled, rollouts=rollouts)


def _tokens(step: Step) -> int:
    return sum(micro["input_ids"].numel() for micro in step)


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."


class Meter:
    """Rates and memory of a step.

    Tokens are positions computed, padding included.
    """

    def __init__(self, engine: Engine, precision: str) -> None:
        self._engine = engine
        gpu = find_gpu(str(engine.device.torch_device))
        counts = gpu is not None and precision == "bf16"
        self._peak_tflops = bf16_peak_tflops(gpu.name) if gpu and counts else None

    def measure(self, tokens: int, seconds: float) -> dict[str, Any]:
        """What `metrics.jsonl` says of a step besides its loss."""
        tflops = model_tflops(*self._engine.computing, tokens, seconds)
        return {
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 3),
            "model_tflops": round(tflops, 6),
            "mfu": round(tflops / self._peak_tflops, 4) if self._peak_tflops else None,
            "device_peak_bytes": self._engine.memory()["device_peak_bytes"],
            "host_bytes": process_bytes(),
        }
