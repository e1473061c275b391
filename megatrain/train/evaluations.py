"""Evaluations of a run: when they are due, their metrics, the best state, and the early end."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.base.units import duration
from megatrain.config import Config, step_loss
from megatrain.data import Step
from megatrain.loss import Distillation, JointLoss, MultiLabel, num_labelled, targets_of
from megatrain.telemetry.console import measured
from megatrain.telemetry.metrics import MetricsWriter, Record, is_evaluation
from megatrain.train.sharing import logprobs, part_of
from megatrain.train.signals import Signals

if TYPE_CHECKING:
    from megatrain.train.setup import Job

# Of each part the micro-batches, computed at once, and their labelled tokens; or prompts, and 0.
_Parts = list[tuple[Any, int]]
_MOST_NATS = 700  # exp() of a larger mean loss overflows

log = logging.getLogger(__name__)


class Evaluations:
    """Does the evaluations of a run, each once, however often the run is resumed.

    A signal breaks off an evaluation, except the last; a resumed run repeats it.
    """

    def __init__(
        self, job: "Job", metrics: MetricsWriter, logged: Sequence[Record], signals: Signals
    ) -> None:
        config = job.config
        self._job, self._engine, self._metrics, self._signals = job, job.engine, metrics, signals
        self._loss = step_loss(config.loss, config.rollout)
        # As many rows at once as in a step: more would need memory that no plan counts.
        at_once = -(-config.training.batch_size // job.loader.rows_per_micro_batch)
        shift = self._engine.label_shift
        self._sets: dict[str, _Parts] = {}
        rows: Any
        for name, rows in job.evaluation.items():
            if job.rollouts is None:
                self._sets[name] = _parts(rows, at_once, shift)
            else:
                prompts, size = range(len(rows)), job.rollouts.at_once
                self._sets[name] = [(prompts[first : first + size], 0) for first in prompts[::size]]
        self._every = config.training.eval_every
        self._done = {record["step"] for record in logged if is_evaluation(record)}
        self._step_losses: list[float] = []  # since the last evaluation
        for record in logged:
            self.see(record)

    def see(self, record: Record) -> None:
        """Note a record of the log: an evaluation shows the mean of the losses since the last."""
        if is_evaluation(record):
            self._step_losses.clear()
        elif isinstance(record.get("loss"), float):
            self._step_losses.append(record["loss"])

    def after(self, step: int, say: Callable[[str], None], *, final: bool) -> Record | None:
        """Evaluate if an evaluation is due after `step`; return its record for the log, or None."""
        due = final or (step > 0 and self._every is not None and step % self._every == 0)
        if not (due and self._sets) or step in self._done:
            return None
        started = time.perf_counter()
        scores = self._scores(step, final=final)
        if scores is None:
            return None
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {"step": step, **scores, "eval_seconds": round(seconds, 4)}
        say(f"step {step}/{self._job.total_steps}  {self._described(scores)}  {duration(seconds)}")
        self._metrics.write(**record)
        self._done.add(step)
        self.see(record)
        return record

    def _scores(self, step: int, *, final: bool) -> dict[str, float] | None:
        """Metrics over all sets, and over each named set; None: a signal stopped the evaluation."""
        results: dict[str, list[Any]] = {}
        for name, parts in self._sets.items():
            results[name] = []
            for part, count in parts:
                if self._signals.stop and not final:
                    return None
                results[name] += self._results(name, part, count)
        if self._job.rollouts is not None:
            rewarded = self._job.rollouts.rewarded(results, step)
            return {f"eval_{key}": value for key, value in rewarded.items()}
        all_results = [result for set_results in results.values() for result in set_results]
        all_parts = [part for parts in self._sets.values() for part in parts]
        metrics = self._metrics_of(all_results, all_parts, "")
        for name in filter(None, results):
            metrics |= self._metrics_of(results[name], self._sets[name], f"{name}_")
        return metrics

    def _results(self, name: str, part: Any, count: int) -> list[Any]:
        """Summed loss and right labels of a part; of a joint loss its inputs by row; or replies."""
        data: Any = self._job.data.get(name)
        if self._job.rollouts is not None:
            return self._job.rollouts.evaluation_replies(data, part)
        if isinstance(self._loss, JointLoss):
            return logprobs(self._engine, self._loss.bare(part), data, reads=self._loss.reads)
        rows = part_of(part, self._engine.batch_ranks)
        if data is not None:
            rows = [data.with_images(micro) for micro in rows]
        if isinstance(self._loss, Distillation | MultiLabel):
            return [(self._engine.evaluate(rows, self._loss) * count, 0.0)]
        loss, accuracy = self._engine.score(rows)
        return [(loss * count, accuracy * count)]

    def _metrics_of(self, results: list[Any], parts: _Parts, prefix: str) -> dict[str, float]:
        if isinstance(self._loss, JointLoss):
            steps = [part for part, _ in parts]
            if not self._loss.depends_on_step:
                steps = [[micro for part in steps for micro in part]]
            values = _joint_means(self._loss, iter(results), steps)
        else:
            loss, num_right = (sum(column) for column in zip(*results, strict=True))
            num_labels = sum(count for _, count in parts)
            mean = loss / num_labels
            values = {"loss": mean}
            metrics = self._job.config.loss.metrics
            if "perplexity" in metrics:
                values["perplexity"] = math.exp(mean) if mean < _MOST_NATS else math.inf
            if "accuracy" in metrics:
                values["accuracy"] = num_right / num_labels
        return {f"eval_{prefix}{name}": value for name, value in values.items()}

    def _described(self, scores: Mapping[str, float]) -> str:
        parts, losses = measured(scores, "eval_"), self._step_losses
        if "eval_loss" in scores:
            parts[0] += f" (training {sum(losses) / len(losses):.4f})" if losses else ""
            named = [name for name in self._sets if name]  # "": the set of a plain data.eval_path
            parts += [f"{name} {scores[f'eval_{name}_loss']:.4f}" for name in named]
        return "evaluation " + "  ".join(parts)


def _joint_means(loss: JointLoss, results: Iterator[Any], steps: list[Step]) -> dict[str, float]:
    """Loss and measures of a joint loss: means over steps, weighted by their rows."""
    scores = [loss.loss_and_measures([*islice(results, len(rows))], rows) for rows in steps]
    if len(scores) == 1:
        return scores[0]
    sizes = [sum(len(micro["labels"]) for micro in rows) for rows in steps]
    return {name: float(np.average([s[name] for s in scores], weights=sizes)) for name in scores[0]}


def _parts(micros: Step, at_once: int, shift: int) -> _Parts:
    parts = [micros[start : start + at_once] for start in range(0, len(micros), at_once)]
    counts = [sum(num_labelled(targets_of(m["labels"], shift)) for m in part) for part in parts]
    labelled = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    return labelled or [(part, 0) for part in parts[:1]]  # no label at all: the engine refuses it


class Watch:
    """Finds the best state of a run, and its early end, by one metric of its evaluations.

    It knows the run's log alone, so a resumed run decides as one that was never interrupted.
    """

    def __init__(self, config: Config, logged: Iterable[Record]) -> None:
        """Args: `logged`: the records of the run so far."""
        self.metric = config.watched
        self._sign = -1.0 if config.larger_is_better else 1.0
        self._rule = config.training.early_stopping
        self._values: dict[int, float] = {}  # by evaluated step; smaller is better
        self._reference, self._waited = math.inf, 0  # the value to beat; evaluations since
        for record in logged:
            self.see(record)

    def see(self, record: Record) -> bool:
        """Note a record of the log; return True if it is an evaluation better than all before."""
        if self.metric not in record:
            return False
        value = record[self.metric]
        is_finite = isinstance(value, int | float) and math.isfinite(value)
        signed = self._sign * value if is_finite else math.inf
        min_delta = self._rule.min_delta if self._rule else 0.0
        if signed < self._reference - min_delta:
            self._reference, self._waited = signed, 0
        else:
            self._waited += 1
        is_best = signed < min(self._values.values(), default=math.inf)
        if is_finite:
            self._values[record["step"]] = signed
        return is_best

    def value(self, step: int) -> float | None:
        """The metric after a step; None: it is not known."""
        return self._sign * self._values[step] if step in self._values else None

    @property
    def ranked(self) -> list[int]:
        """The evaluated steps, best first; of equal ones the earlier first."""
        return sorted(self._values, key=lambda step: (self._values[step], step))

    @property
    def stop(self) -> str | None:
        """The reason to end the run now; None: go on."""
        if self._rule is None or self._waited < self._rule.patience:
            return None
        times = f"{self._waited} evaluation{'s' if self._waited > 1 else ''}"
        if self._reference == math.inf:
            return f"{self.metric} was no number in {times}"
        best = self._sign * self._reference
        return f"{self.metric} was not better than {best:.4g} in {times}"
