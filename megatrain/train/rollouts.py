"""Replies that the model makes of prompts itself, rewarded: what steps of GRPO and RLOO learn.

A rollout is a function of the prompts, the weights and a seed that follows from the run's and the
rollout's number, so that a run goes on as it would have. One that several steps learn from is kept
in checkpoints between them.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerState

from megatrain.api import Engine
from megatrain.base.seeds import derived_seed
from megatrain.config import Config, step_loss
from megatrain.data import PLAIN, PromptRow, Prompts, Step, StepLoader
from megatrain.data.dataset import Layout
from megatrain.data.tokenizer import pad_id
from megatrain.errors import InputError, StepRefused
from megatrain.generate import Sampling, continued, stop_ids
from megatrain.loss import IGNORED, PolicyLoss, num_labelled
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.train.rewards import Rewards, measured
from megatrain.train.served import Served, compare
from megatrain.train.sharing import from_first, logprobs

log = logging.getLogger(__name__)

# Names that lines of the log have already: what functions log under one would be taken for it.
_TAKEN = re.compile(
    r"(eval_|rewards/|completions/|clip_ratio/|sampling/).*|((generate|reward|logprobs|train)_)?seconds|"
    r"step|epoch|loss|aux_loss|grad_norm|lr|kl|cispo_clip_ratio|reward|reward_std|tokens|"
    r"tokens_per_second|frac_reward_zero_std|model_tflops|mfu|device_peak_bytes|host_bytes|busy|"
    r"idle|skipped|failed|rows|samples"
)
_SEED = 0x726F6C6C  # apart from the seeds of steps


class Reply(NamedTuple):
    """What the model has made of a prompt; `ended`: by itself."""

    row: PromptRow
    ids: list[int]
    ended: bool
    log_probs: Sequence[float] = ()  # of each token, as a server says


class Rollouts:
    """Makes the micro-batches of each step.

    Attributes:
        step: that was taken last.
    """

    def __init__(
        self,
        config: Config,
        rewards: Rewards,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        loader: StepLoader,
        reference: Engine | None,
        total_steps: int,
        ranks: Ranks = ALONE,
    ) -> None:
        """Args: `loader` gives prompts; `reference`: an engine with the reference model.

        Several `ranks` make a part of the replies each; the first one rewards them all.
        """
        loss = step_loss(config.loss, config.rollout)
        assert isinstance(loss, PolicyLoss)
        self._loss, self._engine, self._reference = loss, engine, reference
        self._settings, self._seed = config.rollout, config.training.seed
        self._tokenizer, self._loader, self._total = tokenizer, loader, total_steps
        self._rewards, self._ranks = rewards, ranks
        self._pad = pad_id(tokenizer, engine.vocab_size)
        length = config.data.sequence_length
        self._layout = Layout("chat", length, False, "error", self._pad)
        self._at_once = config.rollout.batch_size or config.training.batch_size * loss.lines
        self._made: Step = []
        self._left = self._rollouts = self._in_vain = 0
        self.step = 0
        self._server = None if config.rollout.server is None else Served(config, engine, ranks)

    def take(self, step: int) -> tuple[Step, dict[str, Any]]:
        """Micro-batches of a step, and what the log says of replies that were made for it.

        Raises:
            RunFailed: a reward function has failed.
            StepRefused: no function has rewarded any of its replies.
            DoesNotFit: no memory for keys and values.
        """
        told: dict[str, Any] = {}
        self.step = step
        if self._left == 0:
            step_rows: Any = next(self._loader)
            self._made, told = self._roll([row for micro in step_rows for row in micro], step)
            self._left = self._loss.num_iterations
        self._left -= 1
        return self._made, told

    def state_dict(self) -> dict[str, Any]:
        """What steps to come will learn from again, as JSON keeps it; nothing between rollouts."""
        if self._left == 0:
            return {}
        made = [{name: each.tolist() for name, each in micro.items()} for micro in self._made]
        return {"left": self._left, "step": made, "temperature": self._loss.temperature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            InputError: it is damaged, or of another loss or temperature.
        """
        try:
            self._left = int(state.get("left", 0))
            taken_at = float(state.get("temperature", 1))  # always 1 where it is not said
            self._made = [
                {
                    name: torch.tensor(each, dtype=torch.int64 if name in PLAIN else torch.float32)
                    for name, each in micro.items()
                }
                for micro in state.get("step", [])
            ]
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"the saved replies are damaged: {error}") from error
        if self._left and any({*micro} - {*PLAIN} != {*self._loss.inputs} for micro in self._made):
            raise InputError(
                f"{self._left} more steps learn from replies made for another loss.name, loss.beta "
                "or rollout.importance_sampling_mode; set them back, or begin anew: megatrain "
                "branch --fresh"
            )
        if self._left and taken_at != (now := self._loss.temperature):
            raise InputError(
                f"{self._left} more steps learn from replies whose log-probabilities are at "
                f"rollout.temperature {taken_at:g}, and it is {now:g} now; set it back, or begin "
                "anew: megatrain branch --fresh"
            )

    def _roll(self, rows: Sequence[PromptRow], step: int) -> tuple[Step, dict[str, Any]]:
        seconds: dict[str, float] = {}
        with _timed(seconds, "generate"):
            number = int(self._loader.state_dict()["steps"])
            replies = self._replies(rows, self._loss.lines, number)
        told: dict[str, Any] = {}
        with _timed(seconds, "reward"):
            each_RF = self._rewarded(replies, step, told)
            rewards = self._rewards.together(each_RF)
            _require_some(rewards)
        with _timed(seconds, "logprobs"):
            made, divergence, order = self._with_logprobs(replies)
            if self._server is not None:
                drawn_at = [replies[number].log_probs for number in order]
                by = getattr(self._loss, "importance_sampling", None)
                told |= compare(self._settings, made, drawn_at, by)
        advantages = self._loss.advantages(rewards, divergence)
        numbers = iter(order)
        for micro in made:
            own = torch.tensor([next(numbers) for _ in micro["labels"]])
            shape = micro["labels"].shape
            micro["example"] = own[:, None].expand(shape).float().contiguous()
            micro["advantage"] = advantages[own][:, None].expand(shape).contiguous()
        told |= measured(each_RF, rewards, self._rewards.names) | _described(replies)
        learnt = sum(num_labelled(micro["labels"]) for micro in made)
        self._rollouts += 1
        if not learnt or not advantages.any():
            self._say_what_teaches_nothing(step, masked=not learnt)
        if learnt and self._reference is not None and "reference_logp" not in self._loss.inputs:
            told["kl"] = float(divergence.sum()) / learnt  # GRPO measures its own with each step
        groups = rewards.view(-1, self._loss.lines)
        told["frac_reward_zero_std"] = float((groups == groups[:, :1]).all(1).double().mean())
        return made, told | {f"{name}_seconds": round(each, 6) for name, each in seconds.items()}

    def _say_what_teaches_nothing(self, step: int, *, masked: bool) -> None:
        self._in_vain += 1
        times = f"{self._in_vain} of {self._rollouts} rollouts so far"
        if masked:
            log.warning(
                "step %d: no reply has ended, and loss.mask_truncated_completions leaves such out: "
                "nothing is learnt (%s); raise loss.max_completion_length",
                step,
                times,
            )
            return
        against = "reference_logp" in self._loss.inputs
        log.warning(
            "step %d: all replies to each prompt are rewarded alike: %s (%s); give rewards that "
            "tell replies apart, prompts that are neither too easy nor too hard, or more "
            "loss.num_generations",
            step,
            "only loss.beta's divergence is learnt" if against else "nothing is learnt",
            times,
        )

    def tried(self, prompts: Prompts, stop: Callable[[], bool]) -> list[Reply] | None:
        """One reply to each prompt, with the same random numbers each time; None: given up."""
        size = self._at_once
        made: list[Reply] = []
        for first in range(0, len(prompts), size):
            if stop():
                return None
            rows = range(first, min(first + size, len(prompts)))
            made += self._replies(prompts.batch(rows), 1, -1 - first)
        return made

    def rewarded(self, sets: Mapping[str, Sequence[Reply]]) -> dict[str, float]:
        """What the log says of replies that nothing is learnt from: of all, and of each named set.

        Functions are called once, with the replies of all sets; what they log is of all.
        """
        told: dict[str, Any] = {}
        every = [reply for replies in sets.values() for reply in replies]
        each_RF = self._rewarded(every, self.step + 1, told)
        told |= self._told(every, each_RF)
        parts = each_RF.split([len(replies) for replies in sets.values()])
        for (name, replies), part_RF in zip(sets.items(), parts, strict=True):
            own = self._told(replies, part_RF) if name else {}
            told |= {f"{name}_{key}": value for key, value in own.items()}
        return told

    def _told(self, replies: Sequence[Reply], each_RF: Tensor) -> dict[str, float]:
        found = measured(each_RF, self._rewards.together(each_RF), self._rewards.names)
        if "reward" not in found:
            log.warning(
                "no reward function has rewarded any of %d replies: this evaluation has no reward",
                len(replies),
            )
        return found | _described(replies)

    def _replies(self, rows: Sequence[PromptRow], count: int, number: int) -> list[Reply]:
        """`count` replies to each, drawn with the seed of this number."""
        settings, chat = self._settings, any(not isinstance(row.prompt, str) for row in rows)
        sampling = Sampling(
            max_new_tokens=self._loss.max_completion_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            repetition_penalty=settings.repetition_penalty,
            seed=derived_seed(self._seed, _SEED, number),
        )
        stops = stop_ids(self._engine, self._tokenizer, chat=chat)
        if self._server is not None:
            said = self._server.replies([row.ids for row in rows], count, sampling, stops)
            return [Reply(rows[at // count], *each) for at, each in enumerate(said)]
        every = [row for row in rows for _ in range(count)]
        made = continued(
            self._engine,
            [row.ids for row in every],
            sampling,
            GenerationConfig(),  # nothing of the model's own settings: they bend what is drawn
            stops=stops,
            pad=self._pad,
            batch_size=self._at_once,
            apart=True,
        )
        return [Reply(row, ids, ids[-1] in stops) for row, ids in zip(every, made, strict=True)]

    def _rewarded(self, replies: Sequence[Reply], step: int, told: dict[str, Any]) -> Tensor:
        texts = self._tokenizer.batch_decode([r.ids for r in replies], skip_special_tokens=True)
        said = [
            text if isinstance(r.row.prompt, str) else [{"role": "assistant", "content": text}]
            for r, text in zip(replies, texts, strict=True)
        ]
        names = dict.fromkeys(name for reply in replies for name in reply.row.beside)
        beside = {name: [r.row.beside.get(name) for r in replies] for name in names}

        def rewarded() -> tuple[Tensor, dict[str, Any]]:
            logged: dict[str, Any] = {}
            found = self._rewards.of(
                [reply.row.prompt for reply in replies],
                said,
                completion_ids=[reply.ids for reply in replies],
                trainer_state=TrainerState(global_step=step - 1, max_steps=self._total),
                log_metric=lambda name, value: _log_metric(logged, name, value),
                **beside,
            )
            return found, logged

        each_RF, logged = from_first(self._ranks, rewarded)  # functions may do more than reward
        told |= logged
        return each_RF

    def _with_logprobs(self, replies: Sequence[Reply]) -> tuple[Step, Tensor, list[int]]:
        """Micro-batches, of like length; the divergence of each reply; which they are, in order."""
        rows = [_row(reply, mask=self._loss.mask_truncated_completions) for reply in replies]
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
        size = self._loader.rows_per_micro_batch * self._loss.lines
        parts = [order[at : at + size] for at in range(0, len(order), size)]
        made = [self._layout.batch([[rows[row]] for row in part]) for part in parts]
        plain = [dict(micro) for micro in made]
        divergence = torch.zeros(len(rows), dtype=torch.float64)
        if all((micro["labels"] == IGNORED).all() for micro in made):
            old = reference = [torch.zeros(micro["labels"].shape) for micro in made]
        else:
            at: dict[str, Any] = {"temperature": self._loss.temperature}
            old = logprobs(self._engine, plain, self._ranks, **at)
            reference = old
            if self._reference is not None:
                reference = logprobs(self._reference, plain, self._ranks, **at)
        for micro, own, theirs, part in zip(made, old, reference, parts, strict=True):
            divergence[part] = (own.double() - theirs.double()).sum(1)
            micro["old_logp"] = own
            if "reference_logp" in self._loss.inputs:
                micro["reference_logp"] = theirs
        return made, divergence, order


def _require_some(rewards_R: Tensor) -> None:
    """Raises StepRefused: there are none, so that nothing could be learnt."""
    if rewards_R.isnan().all():
        raise StepRefused(
            f"no function of rollout.rewards has rewarded any of the {len(rewards_R)} replies: "
            "each returned None or NaN for all of them; correct the functions, or leave such "
            "steps out with training.on_nonfinite: skip",
            intact=True,
        )


def _row(reply: Reply, *, mask: bool) -> tuple[Any, Any]:
    """Ids and labels: those of the reply, unless it is masked for it did not end."""
    ids = np.array([*reply.row.ids, *reply.ids], np.int64)
    learnt = np.arange(len(ids)) >= len(reply.row.ids)
    return ids, np.where(learnt & (reply.ended or not mask), ids, IGNORED)


def _log_metric(told: dict[str, Any], name: str, value: Any) -> None:
    if _TAKEN.fullmatch(name):
        raise ValueError(f"log_metric: {name!r} is a name of the log's own; take another")
    told[name] = float(value)


def _described(replies: Sequence[Reply]) -> dict[str, float]:
    lengths = [len(reply.ids) for reply in replies]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not r.ended for r in replies) / len(replies),
    }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
