"""Generates the model's replies to prompts and rewards them, for steps of GRPO.

A rollout depends on the prompts, the weights, and a seed derived from the run's seed and the
rollout's number; so a resumed run equals one that never stopped. If several steps learn from a
rollout, checkpoints between these steps keep its replies.
"""

import asyncio
import copy
import importlib.util
import inspect
import logging
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerState

from megatrain.api import Engine
from megatrain.base.seeds import derived_seed
from megatrain.config import Config, RolloutSection, step_loss
from megatrain.data import PLAIN, PromptRow, Prompts, Step, StepLoader
from megatrain.data.dataset import Layout
from megatrain.data.token_store import Tokens
from megatrain.data.tokenizer import pad_id
from megatrain.errors import InputError, RunFailed, StepRefused, explained, in_one_line
from megatrain.generate.sampling import Sampling
from megatrain.generate.texts import continued, stop_ids
from megatrain.loss import GRPO, IGNORED, num_labelled
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.train.sharing import logprobs

log = logging.getLogger(__name__)

# Names of a record's own values, under which reward functions must not log.
_RESERVED = re.compile(
    r"(eval_|rewards/|completions/|clip_ratio/).*|((generate|reward|logprobs|train)_)?seconds|"
    r"step|epoch|loss|aux_loss|grad_norm|lr|kl|cispo_clip_ratio|reward|reward_std|tokens|"
    r"tokens_per_second|frac_reward_zero_std|model_tflops|mfu|device_peak_bytes|host_bytes|busy|"
    r"idle|skipped|failed|rows"
)
_LARGEST = torch.finfo(torch.float32).max  # squares of larger rewards may overflow
_SEED = 0x726F6C6C  # separates these seeds from those of steps


class Rewards:
    """The reward functions of a run, called in turn; `names`: the functions' names in the log."""

    def __init__(self, settings: RolloutSection) -> None:
        """Raises InputError: a module cannot be imported, or has no such function."""
        paths = {entry: entry.rpartition(":")[0] for entry in settings.rewards}  # PATH:FUNCTION
        modules = {path: _module(path) for path in dict.fromkeys(paths.values())}
        self.names = [entry.rpartition(":")[2] for entry in settings.rewards]
        if len(set(self.names)) < len(self.names):
            raise InputError("rollout.rewards: two functions have one name; rename one")
        self._functions: list[Callable[..., Any]] = []
        for name, path in zip(self.names, paths.values(), strict=True):
            function = getattr(modules[path], name, None)
            if not callable(function):
                raise InputError(f"rollout.rewards: {path} has no function {name!r}")
            self._functions.append(function)
        self._weights = settings.weights or [1.0] * len(self.names)

    def of(self, prompts: Sequence[Any], replies: Sequence[Any], /, **columns: Any) -> Tensor:
        """Call all functions; return their rewards of all replies `[R, F]`, fp64, NaN for None.

        Args: `columns`: further arguments. Each function gets copies of all arguments.
        """
        rewards = []
        for name, function in zip(self.names, self._functions, strict=True):
            try:
                arguments = {"prompts": prompts, "completions": replies, **columns}
                values = function(**copy.deepcopy(arguments))
                if inspect.isawaitable(values):
                    with ThreadPoolExecutor(1) as thread:  # notebooks have a running loop
                        values = thread.submit(asyncio.run, _awaited(values)).result()
            except (Exception, SystemExit) as error:  # whatever a user's function does
                log.error("the reward function %s failed", name, exc_info=error)
                reason = f"{type(error).__name__}: {in_one_line(error, 200)}"
                raise RunFailed(f"reward {name} failed: {reason}") from None
            rewards.append(_column(name, values, len(replies)))
        return torch.stack(rewards, 1)

    def weighted_sum(self, rewards_RF: Tensor) -> Tensor:
        """The weighted sum `[R]` of the functions' rewards; NaN: no function gave a reward."""
        summed = (rewards_RF * torch.tensor(self._weights, dtype=torch.float64)).nansum(1)
        return summed.masked_fill(rewards_RF.isnan().all(1), math.nan)


async def _awaited(values: Any) -> Any:
    return await values


def _column(name: str, returned: Any, count: int) -> Tensor:
    """A function's rewards of `count` replies. Raises RunFailed: it has returned something else."""
    try:
        if isinstance(returned, str | bytes | Mapping | Set):  # keys, or values without an order
            raise TypeError
        items = returned.tolist() if isinstance(returned, Tensor) else returned
        values = [math.nan if value is None else float(value) for value in items]
    except (TypeError, ValueError, OverflowError):
        values = []
    if len(values) != count or any(abs(value) > _LARGEST for value in values):
        raise RunFailed(
            f"reward {name} returned {returned!r:.60}; it must return a list of finite numbers or "
            f"None, one for each of {count} completions"
        )
    return torch.tensor(values, dtype=torch.float64)


def _module(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).expanduser().resolve()
        name = f"{__name__}:{path}"  # a name that no import statement can have
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # the module's own code runs
        kind = type(error).__name__
        raise InputError(
            f"rollout.rewards: {where} cannot be imported: {kind}: {in_one_line(error, 200)}; name "
            "a module of this Python, or a file such as rewards.py:reward"
        ) from error


def measured(rewards_RF: Tensor, sums_R: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Means and standard deviations of rewards over replies, by TRL's names; NaN is left out."""
    pairs = zip(names, rewards_RF.T, strict=True)
    columns = [(f"rewards/{name}/mean", f"rewards/{name}/std", values) for name, values in pairs]
    measures: dict[str, float] = {}
    for mean, std, values in (*columns, ("reward", "reward_std", sums_R)):
        numbers = values[~values.isnan()]
        measures |= {mean: float(numbers.mean())} if len(numbers) else {}
        measures |= {std: float(numbers.std())} if len(numbers) > 1 else {}
    return measures


class Reply(NamedTuple):
    """A reply of the model to a prompt; `ended`: True if a stop token ended it, not its length."""

    row: PromptRow
    ids: list[int]
    ended: bool


@dataclass
class Rollouts:
    """Makes the micro-batches of each step: replies with their advantages and log-probabilities.

    Of several `ranks` each generates a part of the replies; rank 0 rewards all. `loader` gives
    prompts; `reference` is an engine with the reference model.
    """

    config: Config
    rewards: Rewards
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    loader: StepLoader
    reference: Engine | None
    total_steps: int
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        config = self.config
        loss = step_loss(config.loss, config.rollout)
        assert isinstance(loss, GRPO)
        self._loss = loss
        self._pad = pad_id(self.tokenizer, self.engine.vocab_size)
        length = config.data.sequence_length
        self._layout = Layout("chat", length, packing=False, overlong="error", pad_id=self._pad)
        self.at_once = config.rollout.batch_size or config.training.batch_size * loss.lines
        self._step: Step = []
        self._steps_left = self._num_rollouts = self._num_without_signal = 0

    def take(self, step: int) -> tuple[Step, dict[str, Any]]:
        """The micro-batches of a step, and values for the log if they are new replies.

        Raises RunFailed: a reward function has failed; StepRefused: no function has given a reward
        to any reply; DoesNotFit: no memory for keys and values.
        """
        logged: dict[str, Any] = {}
        if self._steps_left == 0:
            step_rows: Any = next(self.loader)
            self._step, logged = self._roll([row for micro in step_rows for row in micro], step)
            self._steps_left = self._loss.num_iterations
        self._steps_left -= 1
        return self._step, logged

    def state_dict(self) -> dict[str, Any]:
        """The replies that later steps will learn from, as JSON; empty if there are none."""
        if self._steps_left == 0:
            return {}
        rows = [{name: t.tolist() for name, t in micro.items()} for micro in self._step]
        return {"left": self._steps_left, "step": rows, "temperature": self._loss.temperature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the replies to those of `state_dict`. Raises InputError: damaged, other settings."""
        with explained("the saved replies are damaged", of=(ValueError, TypeError, AttributeError)):
            self._steps_left = int(state.get("left", 0))
            temperature = float(state.get("temperature", 1))  # older checkpoints lack the key
            dtypes = dict.fromkeys(PLAIN, torch.int64)
            self._step = [
                {n: torch.tensor(v, dtype=dtypes.get(n, torch.float32)) for n, v in micro.items()}
                for micro in state.get("step", [])
            ]
        changed = None
        if temperature != self._loss.temperature:
            changed = f"rollout.temperature ({temperature:g}, and now {self._loss.temperature:g})"
        elif any({*micro} - {*PLAIN} != {*self._loss.inputs} for micro in self._step):
            changed = "loss.name or loss.beta"
        if changed and self._steps_left:
            raise InputError(
                f"{self._steps_left} more steps learn from replies made for another {changed}; set "
                "it back, or begin a new run with model.path: this one"
            )

    def _roll(self, rows: Sequence[PromptRow], step: int) -> tuple[Step, dict[str, Any]]:
        """Generate replies and reward them; return micro-batches, and values for the log."""
        logged: dict[str, Any] = {}
        started = time.perf_counter()
        replies = self._replies(rows, self._loss.lines, int(self.loader.state_dict()["steps"]))
        generated = time.perf_counter()
        rewards_RF = self._rewarded(replies, step, logged)
        rewards = self.rewards.weighted_sum(rewards_RF)
        if rewards.isnan().all():
            raise StepRefused(
                f"all functions of rollout.rewards returned None or NaN for all {len(rewards)} "
                "replies; correct them, or leave such steps out with training.on_nonfinite: skip",
                intact=True,
            )
        logged["generate_seconds"] = round(generated - started, 6)
        rewarded = time.perf_counter()
        logged["reward_seconds"] = round(rewarded - generated, 6)
        micros, order = self._with_logprobs(replies)
        logged["logprobs_seconds"] = round(time.perf_counter() - rewarded, 6)
        advantages = self._loss.advantages(rewards)
        reply_numbers = iter(order)  # of all micro-batches' rows
        for micro in micros:
            shape = micro["labels"].shape
            replies_R = torch.tensor([next(reply_numbers) for _ in micro["labels"]])
            micro["example"] = replies_R[:, None].expand(shape).float().contiguous()
            micro["advantage"] = advantages[replies_R][:, None].expand(shape).contiguous()
        logged |= measured(rewards_RF, rewards, self.rewards.names) | _described(replies)
        learnt = sum(num_labelled(micro["labels"]) for micro in micros)
        self._num_rollouts += 1
        if not learnt or not advantages.any():
            self._warn_of_nothing_learnt(step, masked=not learnt)
        groups = rewards.view(-1, self._loss.lines)
        logged["frac_reward_zero_std"] = float((groups == groups[:, :1]).all(1).double().mean())
        return micros, logged

    def _warn_of_nothing_learnt(self, step: int, *, masked: bool) -> None:
        self._num_without_signal += 1
        has_reference = "reference_logp" in self._loss.inputs
        learnt = "only loss.beta's divergence is learnt" if has_reference else "nothing is learnt"
        reason = f"all replies to each prompt are rewarded alike: {learnt}"
        remedy = "give rewards that tell replies apart, or more loss.num_generations"
        if masked:
            reason = (
                "no reply has ended, and loss.mask_truncated_completions leaves such out: nothing "
                "is learnt"
            )
            remedy = "raise loss.max_completion_length"
        times = f"{self._num_without_signal} of {self._num_rollouts} rollouts so far"
        log.warning("step %d: %s (%s); %s", step, reason, times, remedy)

    def evaluation_replies(self, prompts: Prompts, rows: range) -> list[Reply]:
        """One reply to each of these prompts, the same at each call with the same weights."""
        return self._replies(prompts.batch(rows), 1, -1, rows.start)  # no step has this number

    def rewarded(self, sets: Mapping[str, Sequence[Reply]], step: int) -> dict[str, float]:
        """The log's values of replies after `step`: over all sets, and over each named set."""
        logged: dict[str, Any] = {}
        all_replies = [reply for replies in sets.values() for reply in replies]
        all_RF = self._rewarded(all_replies, step + 1, logged)
        by_set = zip(sets, all_RF.split([*map(len, sets.values())]), strict=True)
        named = [(f"{name}_", sets[name], set_RF) for name, set_RF in by_set if name]
        for prefix, replies, rewards_RF in [("", all_replies, all_RF), *named]:
            sums_R = self.rewards.weighted_sum(rewards_RF)
            values = measured(rewards_RF, sums_R, self.rewards.names)
            if "reward" not in values:
                log.warning(
                    "no reward function has rewarded any of %d replies: this evaluation has no "
                    "reward", len(replies),
                )  # fmt: skip
            values |= _described(replies)
            logged |= {f"{prefix}{name}": value for name, value in values.items()}
        return logged

    def _replies(
        self, rows: Sequence[PromptRow], count: int, number: int, first: int = 0
    ) -> list[Reply]:
        """Generate `count` replies to each prompt, numbered from `first`, of rollout `number`."""
        seed = derived_seed(self.config.training.seed, _SEED, number)
        choices = {"temperature", "top_p", "top_k", "repetition_penalty"}
        settings = self.config.rollout.model_dump(include=choices)
        sampling = Sampling(self._loss.max_completion_length, **settings, seed=seed)
        stops = stop_ids(self.engine, self.tokenizer, chat=True)  # those of checkpoints' models
        copies = [row for row in rows for _ in range(count)]
        replies = continued(
            self.engine,
            [row.ids for row in copies],
            sampling,
            GenerationConfig(),  # the model's own settings would change the distribution
            stops=stops,
            pad=self._pad,
            batch_size=self.at_once,
            apart=True,
            first=first,
        )
        return [Reply(row, ids, ids[-1] in stops) for row, ids in zip(copies, replies, strict=True)]

    def _rewarded(self, replies: Sequence[Reply], step: int, logged: dict[str, Any]) -> Tensor:
        """Each function's reward of each reply `[R, F]`; adds what functions log to `logged`."""
        texts = self.tokenizer.batch_decode([r.ids for r in replies], skip_special_tokens=True)
        completions = [
            text if isinstance(r.row.prompt, str) else [{"role": "assistant", "content": text}]
            for r, text in zip(replies, texts, strict=True)
        ]
        names = dict.fromkeys(name for reply in replies for name in reply.row.beside)

        def call_functions() -> tuple[Tensor, dict[str, Any]]:
            values: dict[str, list[float]] = defaultdict(list)

            def log_metric(name: str, value: Any) -> None:
                if _RESERVED.fullmatch(name):
                    raise ValueError(f"log_metric: {name!r} is a name of the log's own")
                values[name].append(float(value))

            rewards = self.rewards.of(
                [reply.row.prompt for reply in replies],
                completions,
                completion_ids=[reply.ids for reply in replies],
                trainer_state=TrainerState(global_step=step - 1, max_steps=self.total_steps),
                log_metric=log_metric,
                **{name: [r.row.beside.get(name) for r in replies] for name in names},
            )
            return rewards, {name: fmean(numbers) for name, numbers in values.items()}

        rewards_RF, values = self.ranks.from_first(call_functions)  # they may have side effects
        logged |= values
        return rewards_RF

    def _with_logprobs(self, replies: Sequence[Reply]) -> tuple[Step, list[int]]:
        """Micro-batches with log-probabilities, the longest rows first; and the replies' order."""
        rows: list[Tokens] = []
        for reply in replies:
            ids = np.array([*reply.row.ids, *reply.ids], np.int64)
            learnt = np.arange(len(ids)) >= len(reply.row.ids)
            learnt &= reply.ended or not self._loss.mask_truncated_completions
            rows.append(Tokens(ids, np.where(learnt, ids, IGNORED)))
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
        sorted_rows = [[rows[row]] for row in order]  # a row is a list of segments, here of one
        size = self.loader.rows_per_micro_batch * self._loss.lines
        starts = range(0, len(order), size)
        micros = [self._layout.batch(sorted_rows[start : start + size]) for start in starts]
        has_labels = any((micro["labels"] != IGNORED).any() for micro in micros)

        def logps(engine: Engine) -> list[Tensor]:
            if not has_labels:
                return [torch.zeros(micro["labels"].shape) for micro in micros]
            return logprobs(engine, micros, temperature=self._loss.temperature)

        old = logps(self.engine)
        reference = old if self.reference is None else logps(self.reference)
        for micro, old_logp, reference_logp in zip(micros, old, reference, strict=True):
            micro["old_logp"] = old_logp
            if "reference_logp" in self._loss.inputs:
                micro["reference_logp"] = reference_logp
        return micros, order


def _described(replies: Sequence[Reply]) -> dict[str, float]:
    lengths = [len(reply.ids) for reply in replies]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not r.ended for r in replies) / len(replies),
    }
