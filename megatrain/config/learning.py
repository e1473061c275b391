"""The sections of training itself: adapter, optimizer, loss, rollouts, schedule, steps."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from megatrain import loss
from megatrain.compat import peft
from megatrain.config.section import (
    Fraction,
    Name,
    NamedSection,
    Natural,
    Pattern,
    Positive,
    Section,
    a_pattern,
    nearest,
    shown,
)
from megatrain.errors import InputError
from megatrain.loss import ClassHead, Loss
from megatrain.optim import NO_ADAFACTOR, RULES, Rule


class AdapterSection(Section):
    """LoRA, rsLoRA or DoRA, by the keys of PEFT's LoraConfig (docs/adapters.md)."""

    method: Literal["lora"] | None = None
    r: Positive = 8
    lora_alpha: Positive = 8
    target_modules: list[Name] | Name | None = None
    target_parameters: list[Name] | None = None
    exclude_modules: list[Name] | Name | None = None
    lora_dropout: Fraction = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[Name] | None = None
    init_lora_weights: bool | Literal["gaussian"] = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Name] | Name | None = None
    rank_pattern: dict[Pattern, Positive] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    fan_in_fan_out: bool = False

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _names_or_a_pattern(cls, value: Any) -> Any:
        return a_pattern(value) if isinstance(value, str) else value

    @property
    def keys(self) -> dict[str, Any] | None:
        """The adapter's keys as `Engine` takes them; None: there is no adapter."""
        return None if self.method is None else self.model_dump(exclude={"method"})

    def problems(self) -> Iterator[str]:
        if self.method is None:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.get_default(call_default_factory=True):
                    yield f"{name} needs method: lora"
            return
        try:
            peft.lora_config(self.keys or {})
        except InputError as error:
            yield str(error).removeprefix("adapter: ")


class OptimizerSection(NamedSection):
    """A rule of `megatrain.optim` and its settings (docs/optimizers.md); null: its default."""

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
    ns_precision: Literal["bf16", "fp16", "fp32"] | None = None

    @classmethod
    def defaults(cls, name: str) -> dict[str, Any] | None:
        if (rule := RULES.get(name)) is None:
            return None
        names = (*rule.settings, *rule.choices, *rule.further)
        values = {key: getattr(rule(), key) for key in names}
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
        return plain | {"no_decay": None}

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name == "adafactor":
            raise ValueError(NO_ADAFACTOR)
        if name not in RULES:
            in_8_bits = " with states: int8" if "8bit" in name else ""
            hint = f"; take adamw{in_8_bits}" if "adamw" in name else nearest(name, list(RULES))
            raise ValueError(f"unknown optimizer {name!r}{hint}")
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The rule's settings by name, as the param_groups of torch's optimizers have them."""
        rule = self.rule()
        return {name: getattr(rule, name) for name in rule.settings}

    def rule(self) -> Rule:
        """The optimizer as `Engine` takes it."""
        rule = RULES[self.name]
        names = (*rule.settings, *rule.choices, *rule.further, "no_decay")
        values = {name: getattr(self, name) for name in names}
        return rule(**{name: value for name, value in values.items() if value is not None})


_CLASS_METRICS = ("loss", "accuracy")
_PAIR_METRICS = ("loss", *(f"rewards/{k}" for k in ("chosen", "rejected", "margins", "accuracies")))
_ROW_CLASS_KEYS = {"labels": None, "problem_type": None}
# For each loss: its class, the kind of data that it needs (None: texts or chats), the metrics of
# its evaluations, and the keys, with defaults, that the run file has beside the class's fields.
# The loss of rows with several classes is chosen by `problem_type`.
_LOSSES: dict[str, tuple[str, Any, tuple[str, ...], dict[str, Any]]] = {
    "sft": ("CrossEntropy", None, ("loss", "perplexity", "accuracy"), {"label_smoothing": 0.0}),
    "distill": ("Distillation", None, ("loss",), {"teacher": None, "top_k": 64}),
    "dpo": ("DPO", "pairs", _PAIR_METRICS, {}),
    "reward": ("Reward", "pairs", _PAIR_METRICS, {}),
    "sequence_classification": ("CrossEntropy", "classes", _CLASS_METRICS, _ROW_CLASS_KEYS),
    "several classes": ("MultiLabel", "class_sets", ("loss",), {}),
    "token_classification": ("CrossEntropy", "tags", _CLASS_METRICS, {"labels": None}),
    "contrastive": ("Contrastive", "anchors", _CLASS_METRICS, {}),
    "grpo": ("GRPO", "prompts", ("reward",), {}),
}  # fmt: skip


class LossSection(NamedSection):
    """A loss of `megatrain.loss` and its settings (docs/losses.md).

    `teacher`: the model to distil, by its `top_k` likeliest tokens for each label. `labels`: the
    names of classes, in the order of their numbers.
    """

    name: Literal[
        "sft", "distill", "dpo", "reward", "grpo",
        "sequence_classification", "token_classification", "contrastive",
    ] = "sft"  # fmt: skip
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    beta: Annotated[float, Field(ge=0)] | None = None
    loss_type: str | None = None
    center_rewards_coefficient: Annotated[float, Field(gt=0)] | None = None
    margin: bool | None = None
    labels: list[Name] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = None
    scale: float | None = None
    symmetric: bool | None = None
    pooling: str | None = None
    negatives: Natural | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str | None = None
    scale_rewards: str | None = None
    use_bias_correction_kl: bool | None = None
    num_generations: int | None = None
    num_iterations: int | None = None
    max_completion_length: int | None = None
    mask_truncated_completions: bool | None = None
    teacher: Name | None = None
    top_k: Positive | None = None
    temperature: float | None = None
    cross_entropy: float | None = None
    add_tail: bool | None = None

    @classmethod
    def defaults(cls, name: str) -> dict[str, Any] | None:
        return _loss_fields(name) | _LOSSES[name][3] if name in _LOSSES else None

    @field_validator("name", mode="before")
    @classmethod
    def _not_given_up(cls, name: Any) -> Any:
        pairs = "make pairs of a better and a worse reply and take dpo (docs/losses.md)"
        instead = {"simpo": "take dpo with loss_type: sigmoid_norm", "orpo": "take dpo"}
        instead |= {"kto": pairs, "rloo": "take grpo"}
        if isinstance(name, str) and name in instead:
            raise ValueError(f"{name} has been given up; {instead[name]}")
        return name

    def problems(self) -> Iterator[str]:
        try:
            self.loss()
        except InputError as error:
            yield str(error)
        if self.name == "distill" and self.teacher is None:
            yield "distill needs a teacher: a model's folder, run or hub id"
        names = self.labels or ()
        are_classes = len(names) >= 2 and len({*names}) == len(names)
        if self.name.endswith("classification") and not are_classes:
            yield f"{self.name} needs labels: two names or more, each once, as [bad, good]"

    def loss(self) -> Loss:
        if self.name == "sft" and self.label_smoothing:
            return loss.LabelSmoothing(self.label_smoothing)
        loss_class = getattr(loss, _LOSSES[self._row][0])
        return loss_class(**{name: getattr(self, name) for name in _loss_fields(self._row)})

    @property
    def _row(self) -> str:
        """The row of `_LOSSES` with this loss."""
        has_several = self.problem_type == "multi_label_classification"
        return "several classes" if has_several else self.name

    @property
    def head(self) -> ClassHead | None:
        """The head of classes or of a score that the model gets; None: the model keeps its own."""
        if not self.labels:
            return self.loss().head
        problem = self.problem_type or "single_label_classification"
        return ClassHead(tuple(self.labels), of_tokens=self.kind == "tags", problem_type=problem)

    @property
    def kind(self) -> Any:
        """The kind of data that the loss needs; None: texts or chats."""
        return "margins" if self.margin else _LOSSES[self._row][1]

    @property
    def lines(self) -> int:
        """Rows of tokens for one row of the data: 2 for pairs."""
        return getattr(self.loss(), "lines", 1)

    @property
    def metrics(self) -> tuple[str, ...]:
        return _LOSSES[self._row][2]


def _loss_fields(name: str) -> dict[str, Any]:
    """The fields of a loss's class that are keys of this section, with their defaults."""
    keys = set(LossSection.model_fields)
    if name != "distill":
        keys.remove("temperature")  # GRPO's is a key of `rollout`
    class_fields = fields(getattr(loss, _LOSSES[name][0]))
    return {field.name: field.default for field in class_fields if field.name in keys}


def _function(text: str) -> str:
    if not re.fullmatch(r".+:[A-Za-z_]\w*", text):
        raise ValueError(
            f"{shown(text)} names no function: write module:function or file.py:function"
        )
    return text


class RolloutSection(Section):
    """The sampling and rewards of replies to prompts (docs/rollouts.md).

    `rewards`: functions, each as `module:function` or `file.py:function`.
    """

    rewards: list[Annotated[str, AfterValidator(_function)]] = Field(default_factory=list)
    weights: list[Annotated[float, Field(ge=-1e6, le=1e6)]] | None = None
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Positive | None = None

    def problems(self) -> Iterator[str]:
        if self.weights is not None and len(self.weights) != len(self.rewards):
            yield f"give as many weights as rewards: {len(self.rewards)}, not {len(self.weights)}"
        if self.weights and not any(self.weights):
            yield "all weights are 0, so that nothing would be rewarded"


def step_loss(loss: LossSection, rollout: RolloutSection) -> Loss:
    """The loss for a run's steps, with the rollouts' temperature."""
    value: Any = loss.loss()
    return replace(value, temperature=rollout.temperature) if loss.kind == "prompts" else value


# The run sets these options of schedules, which then ignore `num_stable_steps`.
_OF_THE_RUN = (
    "optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch",
)  # fmt: skip


class ScheduleSection(Section):
    """A learning-rate schedule of `transformers.get_scheduler`, by name, and its options."""

    name: str = "cosine"
    warmup_steps: Natural | None = None
    warmup_ratio: Fraction | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from transformers import SchedulerType

        needs_metric = {"reduce_lr_on_plateau", "greedy"}
        usable = [s.value for s in SchedulerType if s.value not in needs_metric]
        if name not in usable:
            raise ValueError(f"unknown schedule {name!r}{nearest(name, usable)}")
        return name

    def problems(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            yield "give warmup_steps or warmup_ratio, not both"
        if self.name == "constant" and (self.warmup_steps or self.warmup_ratio):
            yield "constant has no warm-up; take constant_with_warmup"
        for name, value in self.options.items():
            if name.startswith("num_") and isinstance(value, int | float) and value < 0:
                yield f"options: {name} is {value}; it must not be negative"
        if of_run := [name for name in _OF_THE_RUN if name in self.options]:
            yield f"options: {of_run[0]} follows from the run: leave it out"
        if self.name.startswith("constant") and self.options:
            yield f"{self.name} has no options: leave them out"

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`; a ratio is rounded up, as in transformers."""
        if self.warmup_ratio is not None:
            return ceil(total_steps * self.warmup_ratio)
        return self.warmup_steps or 0


class EarlyStopping(Section):
    """Ends a run when `patience` evaluations in a row are not better by more than `min_delta`."""

    patience: Positive
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class TrainingSection(Section):
    """The number and size of steps, and checks of them (docs/training.md, docs/reliability.md).

    `batch_size`, `micro_batch_size`: rows. `recheck`: null: recheck if updates wait for the norm.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    eval_every: Positive | None = None
    early_stopping: EarlyStopping | None = None
    seed: Natural = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: Positive = 10
    spike: Annotated[float, Field(gt=1)] | None = None
    recheck: bool | None = None

    @property
    def refuses(self) -> str | None:
        """The setting that may refuse steps for their gradient norm; None: no setting does."""
        if self.spike is not None:
            return "spike"
        if self.on_nonfinite == "skip":
            return "on_nonfinite: skip"
        return "recheck" if self.recheck else None

    def problems(self) -> Iterator[str]:
        if self.refuses is not None and self.max_grad_norm is None:
            yield (
                f"{self.refuses} needs max_grad_norm: without clipping, weights are updated before "
                "the norm is known (a very large one clips nothing)"
            )
        if (self.steps is None) == (self.epochs is None):
            yield "give either steps or epochs"
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            yield (
                f"micro_batch_size is larger than batch_size ({self.micro_batch_size}, "
                f"{self.batch_size}): lower it, or leave it out, and it is chosen"
            )
