"""Evaluations of a run: when they are due, what they measure, what they say."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatrain.base.units import duration
from megatrain.config import Config, step_loss
from megatrain.data import Prompts, Step, plain_rows
from megatrain.loss import Distillation, JointLoss, Reward, num_labelled, targets_of
from megatrain.telemetry.console import described_rewards
from megatrain.telemetry.metrics import MetricsWriter, is_evaluation
from megatrain.train.rollouts import Rollouts
from megatrain.train.samples import Samples
from megatrain.train.setup import Job
from megatrain.train.sharing import logprobs, part_of
from megatrain.train.signals import Signals

_Parts = list[tuple[Step, int]]  # rows that pass at once, and their labelled tokens
_MOST_NATS = 700  # beyond, a perplexity is no number


class Evaluations:
    """The evaluations of a run; each is done once, however often the run is resumed.

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
        self._loss = step_loss(config.loss, config.rollout)
        self._total, self._ranks = job.total_steps, job.ranks
        # As many rows at once as a step has: more would take memory that no plan counts.
        at_once = max(1, config.training.batch_size // job.loader.rows_per_micro_batch)
        self._rollouts = job.rollouts
        self._sets: dict[str, Any] = {
            name: rows if isinstance(rows, Prompts) else _parts(rows, at_once)
            for name, rows in job.evaluation.items()
        }
        self._every = config.training.eval_every
        self._samples = Samples(config, job)
        self._done = {record["step"] for record in logged if is_evaluation(record)}
        self._trained: list[float] = []  # losses of the steps since the last one
        for record in logged:
            self.trained(record)

    def trained(self, record: Mapping[str, Any]) -> None:
        """Take a line of the log in: the loss of training is said beside that of an evaluation."""
        if is_evaluation(record):
            self._trained.clear()
        elif isinstance(record.get("loss"), float):
            self._trained.append(record["loss"])

    def after(
        self, step: int, say: Callable[[str], None], *, final: bool, asked: bool = False
    ) -> Mapping[str, Any] | None:
        """Evaluate if it is due after `step`, or asked for; returns the line that the log has."""
        due = final or asked or (step > 0 and self._every is not None and step % self._every == 0)
        if not (due and self._sets) or step in self._done:
            return None
        started = time.perf_counter()
        found = self._scores(final=final)
        if found is None:
            return None
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {"step": step, **found, "eval_seconds": round(seconds, 4)}
        say(f"step {step}/{self._total}  {self._described(found)}  {duration(seconds)}")
        record |= self._samples.take(say)
        self._metrics.write(**record)
        self._done.add(step)
        self.trained(record)
        return record

    def _scores(self, *, final: bool) -> dict[str, float] | None:
        """Metrics over all sets, and of each named one; None: given up."""
        if self._rollouts is not None:
            return self._of_prompts(self._rollouts, final=final)
        if isinstance(self._loss, JointLoss):
            return self._of_replies(self._loss, final=final)
        if isinstance(self._loss, Distillation):
            return self._of_a_teacher(self._loss, final=final)
        found: dict[str, tuple[float, float, int]] = {}  # summed loss, right labels, labels
        ranks = self._engine.batch_ranks
        for name, parts in self._sets.items():
            losses, right = [], []
            for part, count in parts:
                if self._signals.stop and not final:
                    return None
                loss, accuracy = self._engine.score(part_of(part, ranks))
                losses.append(loss * count)
                right.append(accuracy * count)
            found[name] = sum(losses), sum(right), sum(count for _, count in parts)
        sums = [sum(each) for each in zip(*found.values(), strict=True)]
        metrics = _metrics("", *sums)
        for name, each in found.items():
            metrics |= _metrics(f"{name}_", *each) if name else {}
        return metrics

    def _of_a_teacher(self, loss: Distillation, *, final: bool) -> dict[str, float] | None:
        """The loss that is trained, over all sets and of each named one."""
        found: dict[str, tuple[float, int]] = {}  # summed loss, labels
        for name, parts in self._sets.items():
            found[name] = 0.0, 0
            for part, count in parts:
                if self._signals.stop and not final:
                    return None
                share = self._engine.evaluate(part_of(part, self._ranks), loss) * count
                found[name] = found[name][0] + share, found[name][1] + count
        losses, counts = zip(*found.values(), strict=True)
        named = {f"eval_{name}_loss": each / of for name, (each, of) in found.items() if name}
        return {"eval_loss": sum(losses) / sum(counts)} | named

    def _of_replies(self, loss: JointLoss, *, final: bool) -> dict[str, float] | None:
        """The measures of a joint loss, each over a whole evaluation set; None: a signal came."""
        every: tuple[list[Tensor], Step] = [], []
        metrics: dict[str, float] = {}
        for name, parts in self._sets.items():
            found: list[Tensor] = []
            rows = [micro for part, _ in parts for micro in part]
            for part, _ in parts:
                if self._signals.stop and not final:
                    return None
                scores = isinstance(loss, Reward)
                found += logprobs(self._engine, plain_rows(part), self._ranks, scores=scores)
            every = every[0] + found, every[1] + rows
            if name:
                metrics |= {f"eval_{name}_{key}": v for key, v in loss.told(found, rows).items()}
        return {f"eval_{key}": v for key, v in loss.told(*every).items()} | metrics

    def _of_prompts(self, rollouts: Rollouts, *, final: bool) -> dict[str, float] | None:
        """Rewards of one reply to each prompt, over all sets and of each."""
        made: dict[str, Any] = {}
        for name, prompts in self._sets.items():
            made[name] = rollouts.tried(prompts, lambda: bool(self._signals.stop) and not final)
            if made[name] is None:
                return None
        return {f"eval_{key}": value for key, value in rollouts.rewarded(made).items()}

    def _described(self, found: Mapping[str, float]) -> str:
        if "eval_loss" not in found:
            return "evaluation " + "  ".join(described_rewards(found, "eval_"))
        beside = ""
        if self._trained:
            beside = f" (training {sum(self._trained) / len(self._trained):.4f})"
        parts = [f"evaluation loss {found['eval_loss']:.4f}{beside}"]
        if "eval_accuracy" in found:
            parts.append(f"accuracy {found['eval_accuracy']:.1%}")
            parts.append(f"perplexity {found['eval_perplexity']:.4g}")
        parts += described_rewards(found, "eval_")
        named = [name for name in self._sets if name]
        parts += [f"{name} {found[f'eval_{name}_loss']:.4f}" for name in named]
        return "  ".join(parts)


def _metrics(prefix: str, loss: float, right: float, count: int) -> dict[str, float]:
    mean = loss / count
    perplexity = math.exp(mean) if mean < _MOST_NATS else math.inf
    values = {"loss": mean, "perplexity": perplexity, "accuracy": right / count}
    return {f"eval_{prefix}{name}": value for name, value in values.items()}


def _parts(rows: Step, at_once: int) -> _Parts:
    parts = [rows[start : start + at_once] for start in range(0, len(rows), at_once)]
    counted = [(part, _labelled(part)) for part in parts]
    return [each for each in counted if each[1]] or counted[:1]  # which is refused


def _labelled(step: Step) -> int:
    return sum(num_labelled(targets_of(micro["labels"])) for micro in step)
