"""The sections that say how a model learns: optimizer, loss, schedule, steps."""

from dataclasses import fields
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.section import Fraction, Name, Natural, Pattern, Positive, Section, nearest
from megatrain.errors import InputError

if TYPE_CHECKING:
    from megatrain.loss import Loss
    from megatrain.optim import Rule


class OptimizerSection(Section):
    """A rule of `megatrain.optim` and its settings; null: as the rule has it, or it has none.

    `no_decay`: patterns of names that do not decay, besides LayerNorms; null: norms and biases.
    `states`: what AdamW's moments are: fp32 (14 bytes a parameter in all), bf16 (10), int8 (8.1).
    `master`: bits of AdamW's master with bf16 layers: 32, exact fp32, or 24, a byte less.
    """

    name: str = "adamw"
    lr: Annotated[float, Field(gt=0)] | None = None
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    no_decay: list[Pattern] | None = None
    states: Literal["fp32", "bf16", "int8"] | None = None
    master: Literal[32, 24] | None = None
    momentum: Annotated[float, Field(ge=0)] | None = None
    dampening: Annotated[float, Field(ge=0)] | None = None
    nesterov: bool | None = None
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    clip: Literal["rest", "all"] | None = None
    adamw_lr: Annotated[float, Field(gt=0)] | None = None
    ns_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    ns_precision: Literal["bf16", "fp32"] | None = None
    packed: dict[Pattern, list[Natural]] | list[tuple[Pattern, list[Natural]]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, given: Any) -> Any:
        """The rule's own values where none is given."""
        from megatrain.optim import NO_ADAFACTOR, RULES

        name = str(given.get("name", "adamw")) if isinstance(given, dict) else ""
        if name == "adafactor":
            raise ValueError(NO_ADAFACTOR)
        if (rule := RULES.get(name)) is None:
            return given  # refused below
        names = (*rule.settings, *rule.choices, *rule.further)
        own = {name: getattr(rule(), name) for name in names}
        foreign = cls.model_fields.keys() - own.keys() - {"name", "no_decay"}
        if wrong := sorted(name for name in foreign if given.get(name) is not None):
            raise ValueError(
                f"{rule.name} has no {' and no '.join(wrong)}; it has {', '.join(own)} (another "
                f"optimizer than a file's: --set 'optimizer={{name: {rule.name}, lr: ...}}')"
            )
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
        return plain | {name: value for name, value in given.items() if value is not None}

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from megatrain.optim import RULES

        if name not in RULES:
            eight = " with states: int8" if "8bit" in name else ""
            near = f"; take adamw{eight}" if "adamw" in name else nearest(name, list(RULES))
            raise ValueError(f"unknown optimizer {name!r}{near}")
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The rule's settings as the groups of torch's optimizer hold them."""
        from megatrain.optim import RULES

        values = {name: getattr(self, name) for name in RULES[self.name].settings}
        return {n: tuple(each) if isinstance(each, list) else each for n, each in values.items()}

    def rule(self) -> "Rule":
        """The optimizer as `Engine` takes it."""
        from megatrain.optim import RULES

        given: dict[str, Any] = {} if self.no_decay is None else {"no_decay": self.no_decay}
        rule = RULES[self.name]
        given |= {name: getattr(self, name) for name in (*rule.choices, *rule.further)}
        return RULES[self.name](**self.settings, **given)


_KINDS: dict[str, Any] = {
    "sft": None,
    "distill": None,
    "kto": "rated",
    "grpo": "prompts",
    "rloo": "prompts",
}


class LossSection(Section):
    """What is minimised: `sft` is cross entropy, others are of replies (docs/losses.md).

    Other keys are the settings that a loss of `megatrain.loss` has; null: as it has them.
    `reference`: whether log-probabilities of the reference model are computed once and kept, or it
    is streamed before each step. `teacher`: a model to distil, of which `top_k` tokens of each
    label are taken, kept or streamed likewise (`teacher_log_probs`).
    """

    name: Literal["sft", "distill", "dpo", "simpo", "orpo", "kto", "reward", "grpo", "rloo"] = "sft"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    z_loss: Annotated[float, Field(ge=0)] | None = None
    beta: Annotated[float, Field(ge=0)] | None = None
    loss_type: str | None = None
    gamma: float | None = None
    desirable_weight: Annotated[float, Field(ge=0)] | None = None
    undesirable_weight: Annotated[float, Field(ge=0)] | None = None
    center_rewards_coefficient: Annotated[float, Field(gt=0)] | None = None
    margin: bool | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str | None = None
    scale_rewards: str | None = None
    use_bias_correction_kl: bool | None = None
    normalize_advantages: bool | None = None
    num_generations: int | None = None
    num_iterations: int | None = None
    max_completion_length: int | None = None
    mask_truncated_completions: bool | None = None
    reference: Literal["kept", "streamed"] | None = None
    teacher: Name | None = None
    teacher_log_probs: Literal["kept", "streamed"] | None = None
    top_k: Positive | None = None
    temperature: float | None = None
    cross_entropy: float | None = None
    add_tail: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, given: Any) -> Any:
        """The loss's own settings where none is given."""
        own = _settings(given.get("name", "sft")) if isinstance(given, dict) else None
        if own is None:
            return given  # refused below
        for name in sorted(cls.model_fields.keys() - own.keys() - {"name"}):
            if given.get(name) is not None:
                name_of = given.get("name", "sft")
                raise ValueError(f"{name_of} has no {name}; it has {', '.join(own)}")
        return own | {name: value for name, value in given.items() if value is not None}

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _as_trl_once_wrote_it(cls, given: Any) -> Any:
        if isinstance(given, bool):
            word = "group" if given else "none"
            raise ValueError(f"TRL's {str(given).lower()} is {word} here: write {word}")
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            self.loss()
        except InputError as error:
            raise ValueError(str(error)) from error
        if self.name == "distill" and self.teacher is None:
            raise ValueError("distill needs a teacher: a model's folder, run or hub id")
        return self

    def loss(self) -> "Loss":
        """The loss as a step takes it."""
        from megatrain.loss import CROSS_ENTROPY, LabelSmoothing, ZLoss

        if self.name != "sft":
            kind = _losses()[self.name]
            return kind(**{name: getattr(self, name) for name in _own(kind)})
        if self.z_loss:
            if self.label_smoothing:
                raise InputError("sft has z_loss or label_smoothing, not both; leave one out")
            return ZLoss(self.z_loss)
        return LabelSmoothing(self.label_smoothing) if self.label_smoothing else CROSS_ENTROPY

    @property
    def kind(self) -> Literal["pairs", "margins", "rated", "prompts"] | None:
        """The kind of data that the loss needs; None: texts or chats."""
        return "margins" if self.margin else _KINDS.get(self.name, "pairs")

    @property
    def lines(self) -> int:
        """Rows of tokens that one row of the data has."""
        return getattr(self.loss(), "lines", 1)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What evaluations measure."""
        if self.name == "sft":
            return "loss", "perplexity", "accuracy"
        if self.kind == "prompts":
            return ("reward",)
        if self.name == "distill":
            return ("loss",)
        kinds = ("chosen", "rejected", "margins", *(["accuracies"] if self.name != "kto" else []))
        return "loss", *(f"rewards/{kind}" for kind in kinds)


# Settings that a loss itself knows nothing of: where what it takes comes from.
_FROM: dict[str, dict[str, Any]] = {
    "dpo": {"reference": "kept"},
    "kto": {"reference": "kept"},
    "distill": {"teacher": None, "teacher_log_probs": "kept", "top_k": 64},
}


def _losses() -> dict[str, Any]:
    from megatrain.loss import DPO, GRPO, KTO, ORPO, RLOO, Distillation, Reward, SimPO

    of_pairs = {"dpo": DPO, "simpo": SimPO, "orpo": ORPO, "kto": KTO, "reward": Reward}
    return of_pairs | {"grpo": GRPO, "rloo": RLOO, "distill": Distillation}


def _own(loss: Any) -> dict[str, Any]:
    """The settings of a loss and their values."""
    from megatrain.loss import PolicyLoss

    elsewhere = {"temperature"} if issubclass(loss, PolicyLoss) else set()  # in `rollout`
    known = LossSection.model_fields.keys() - elsewhere
    return {field.name: field.default for field in fields(loss) if field.name in known}


def _settings(name: Any) -> dict[str, Any] | None:
    """All settings of a loss and their values; None: there is no such loss."""
    if name == "sft":
        return {"label_smoothing": 0.0, "z_loss": 0.0}
    loss = _losses().get(str(name))
    return None if loss is None else _own(loss) | _FROM.get(str(name), {})


# What a run gives to schedules; beside `num_training_steps` they ignore `num_stable_steps`.
_OF_THE_RUN = (
    "optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch",
)  # fmt: skip


class ScheduleSection(Section):
    """Learning-rate schedule: a name known to `transformers.get_scheduler`, and its options."""

    name: str = "cosine"
    warmup_steps: Natural | None = None
    warmup_ratio: Fraction | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from transformers import SchedulerType

        needs_metric = {"reduce_lr_on_plateau", "greedy"}
        known = [s.value for s in SchedulerType if s.value not in needs_metric]
        if name not in known:
            raise ValueError(f"unknown schedule {name!r}{nearest(name, known)}")
        return name

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        if self.name == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError("constant has no warm-up; take constant_with_warmup")
        return self

    @model_validator(mode="after")
    def _options_of_the_schedule(self) -> Self:
        """transformers' own errors name arguments of functions that no run file has."""
        if not self.model_fields_set:
            return self
        from megatrain.compat.transformers import schedule_arguments

        arguments = schedule_arguments(self.name).items()
        own = {name: each for name, each in arguments if name not in _OF_THE_RUN}
        has = f"its options are {', '.join(own)}" if own else "it has none"
        if unknown := [name for name in self.options if name not in own]:
            raise ValueError(f"{self.name} has no option {' and no '.join(unknown)}; {has}")
        needed = [name for name, each in own.items() if each.default is each.empty]
        lacking = [name for name in needed if name not in self.options]
        if {"min_lr", "min_lr_rate"} <= own.keys() and not {"min_lr", "min_lr_rate"} & {
            name for name, value in self.options.items() if value is not None
        }:
            lacking.append("min_lr (a rate) or min_lr_rate (a share of optimizer.lr)")
        if lacking:
            raise ValueError(f"{self.name} needs schedule.options: {' and '.join(lacking)}; {has}")
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`; a ratio is rounded up, as in transformers."""
        if self.warmup_ratio is not None:
            return ceil(total_steps * self.warmup_ratio)
        return self.warmup_steps or 0


class EarlyStopping(Section):
    """A run ends when `patience` evaluations in a row are not better by more than `min_delta`."""

    patience: Positive
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class SamplesSection(Section):
    """Texts to continue, and messages to reply to, after each evaluation."""

    prompts: Annotated[list[str | list[dict[str, Any]]], Field(min_length=1)]
    max_new_tokens: Positive = 64

    @field_validator("prompts", mode="before")
    @classmethod
    def _texts_or_talks(cls, given: Any) -> Any:
        for number, prompt in enumerate(given if isinstance(given, list) else (), 1):
            if isinstance(prompt, dict):
                raise ValueError(
                    f"prompt {number} is a single message: put it into a list, as "
                    "[[{role: user, content: ...}]]"
                )
        return given


class TrainingSection(Section):
    """How long and in what portions. `batch_size` and `micro_batch_size` count rows.

    `on_nonfinite`: what to do when loss or gradient norm is not finite, before any weight is
    changed: end the run, or leave the step out and go on; `max_skips` steps in a row end it, too.
    `early_stopping`: by the metric in `checkpoint.best`, eval_loss if none is there.
    `neftune_alpha`: of the noise on token embeddings in steps.
    `spike`: gradient norms above this many times the median of the last steps are treated alike.
    `recheck`: a step whose loss or norm is not finite, or whose norm is ten times that median, is
    computed once more before it is believed; null: where updates wait for the norm.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    eval_every: Positive | None = None
    early_stopping: EarlyStopping | None = None
    samples: SamplesSection | None = None
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    seed: Natural = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: Positive = 10
    spike: Annotated[float, Field(gt=1)] | None = None
    recheck: bool | None = None

    @property
    def refuses(self) -> str | None:
        """The setting that lets steps be refused once their norm is known; None: none does."""
        if self.spike is not None:
            return "spike"
        if self.on_nonfinite == "skip":
            return "on_nonfinite: skip"
        return "recheck" if self.recheck else None

    @model_validator(mode="after")
    def _refusals_need_clipping(self) -> Self:
        if (name := self.refuses) is not None and self.max_grad_norm is None:
            raise ValueError(
                f"{name} needs max_grad_norm: without clipping, weights are updated before the "
                "norm is known (a very large one clips nothing)"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError("micro_batch_size is larger than batch_size")
        return self
