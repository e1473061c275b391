"""The training loop: steps, evaluations, and what they leave in the run's folder."""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.errors import RunFailed
from megatrain.telemetry.console import TrainingProgress
from megatrain.telemetry.curve import draw_loss
from megatrain.telemetry.environment import environment
from megatrain.telemetry.gpu import bf16_peak_tflops, find_gpu
from megatrain.telemetry.memory import process_bytes
from megatrain.telemetry.metrics import MetricsWriter, read_metrics
from megatrain.train.folders import METRICS, MODEL, new_run_folder, whole_folder
from megatrain.train.prepare import Job, prepare
from megatrain.train.stop import StopRequest
from megatrain.train.timeline import RunTimeline
from megatrain.units import duration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with."""

    folder: Path
    steps: int
    parameters: int
    memory: dict[str, int]


def train(config: Config, name: str) -> Outcome:
    """Train as `config` says and write the run's folder; `name` is part of a derived folder name.

    The folder appears when the first step can start and holds `config.yaml`, `environment.json`,
    `metrics.jsonl`, then `timeline.json` of one early step, `loss.png`, `timeline.png` and, last
    and whole, `model/`.

    Raises:
        InputError: configuration, data or model cannot be used; nothing was written.
        DoesNotFit: more memory is needed than there is; nothing was written.
        RunFailed: a step could not be done; the message names it and its rows.
    """
    folder = new_run_folder(config.output.folder, name)
    job = prepare(config)
    try:
        _describe_run(folder, config, job)
        log.info("writing to %s", folder)
        metrics = MetricsWriter(folder / METRICS)
        timeline = RunTimeline(job.engine.recording, folder, job.total_steps)
        try:
            steps = _steps(job, config, metrics, timeline)
        finally:
            _draw(folder)
            timeline.draw()
        _write_model(job, folder / MODEL)
        return Outcome(folder, steps, job.engine.num_parameters, job.engine.memory())
    finally:
        job.close()


def _steps(job: Job, config: Config, metrics: MetricsWriter, timeline: RunTimeline) -> int:
    """All steps, or those until Ctrl-C; returns how many were done."""
    meter = _Meter(job, config)
    progress = TrainingProgress(job.total_steps, config.output.log_every)
    with progress, StopRequest() as stop:
        for step in range(1, job.total_steps + 1):
            record = _one_step(job, meter, step, metrics, timeline)
            metrics.write(**record)
            progress.step(record)
            if _evaluation_is_due(config, step, job.total_steps):
                _evaluate(job, step, metrics, progress)
            if stop.requested:
                progress.say(f"stopped by Ctrl-C after step {step} of {job.total_steps}")
                return step
    return job.total_steps


def _one_step(
    job: Job, meter: "_Meter", step: int, metrics: MetricsWriter, timeline: RunTimeline
) -> dict[str, Any]:
    lr = job.schedule.get_last_lr()[0]
    started = time.perf_counter()
    try:
        micro_batches = next(job.loader)
        result = timeline.step(step, lambda: job.engine.step(micro_batches))
    except RunFailed as error:
        rows = job.loader.describe()
        metrics.write(step=step, failed=str(error), rows=rows)
        raise RunFailed(f"step {step}: {error}; its rows: {_short(rows)}") from error
    job.schedule.step()
    return {
        "step": step,
        "epoch": round(job.loader.epoch, 4),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        **meter.measure(result.tokens, time.perf_counter() - started),
    }


def _evaluation_is_due(config: Config, step: int, total_steps: int) -> bool:
    every = config.training.eval_every
    return step == total_steps or (every is not None and step % every == 0)


def _evaluate(job: Job, step: int, metrics: MetricsWriter, progress: TrainingProgress) -> None:
    if not job.evaluation:
        return
    started = time.perf_counter()
    loss = job.engine.evaluate(job.evaluation)
    seconds = time.perf_counter() - started
    metrics.write(step=step, eval_loss=loss, eval_seconds=round(seconds, 4))
    progress.say(f"step {step}/{job.total_steps}  evaluation loss {loss:.4f}  {duration(seconds)}")


class _Meter:
    """Rates and memory of a step. Model TFLOPS = 6 x parameters x tokens / seconds.

    Tokens are positions computed, padding included.
    """

    def __init__(self, job: Job, config: Config) -> None:
        self._engine = job.engine
        gpu = find_gpu(str(job.engine.device.torch_device))
        counts = gpu is not None and config.engine.precision == "bf16"
        self._peak_tflops = bf16_peak_tflops(gpu.name) if gpu and counts else None

    def measure(self, tokens: int, seconds: float) -> dict[str, Any]:
        tflops = 6 * self._engine.num_parameters * tokens / seconds / 1e12
        return {
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 3),
            "model_tflops": round(tflops, 6),
            "mfu": round(tflops / self._peak_tflops, 4) if self._peak_tflops else None,
            "device_peak_bytes": self._engine.memory()["device_peak_bytes"],
            "host_bytes": process_bytes(),
        }


def _describe_run(folder: Path, config: Config, job: Job) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.as_yaml(), encoding="utf-8")
    record = environment(str(job.engine.device.torch_device)) | {
        "parameters": job.engine.num_parameters,
        "placement": job.engine.placement.as_dict(),
    }
    text = json.dumps(record, indent=2) + "\n"
    (folder / "environment.json").write_text(text, encoding="utf-8")


def _write_model(job: Job, folder: Path) -> None:
    with whole_folder(folder) as partial:
        job.engine.save_pretrained(partial)
        job.tokenizer.save_pretrained(partial)


def _draw(folder: Path) -> None:
    try:
        draw_loss(list(read_metrics(folder / METRICS)), folder / "loss.png")
    except OSError as error:  # the picture can be drawn again from the metrics; the model cannot
        log.warning("no loss curve: %s", error)


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
