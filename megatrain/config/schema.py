"""The sections of a run file, their defaults and what values are possible."""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from megatrain.errors import InputError
from megatrain.placement import RENAMED, Placement
from megatrain.units import parse_bytes

if TYPE_CHECKING:
    from megatrain.optim import Rule

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _a_name(text: str) -> str:
    """An empty path would be the current folder, read or written to."""
    try:
        possible = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a pair: JSON's way to write what is beyond 16 bits
        possible = False
    if not possible:
        raise ValueError(f"should be a name or a path, got {shown(text)}")
    try:
        Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"no home folder is known for {shown(text)}") from error
    return text


Name = Annotated[str, AfterValidator(_a_name)]


class Section(BaseModel):
    """One section of the run file; strict, so that `"8"` is not quietly taken for `8`."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ModelSection(Section):
    """What is trained: a pretrained `path`, or a `config` to be randomly initialised.

    `chat_template`: a Jinja file that takes the place of the tokenizer's own, in the result, too.
    """

    path: Name | None = None
    config: dict[str, Any] | None = None
    tokenizer: Name | None = None
    chat_template: Name | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either path (a hub id or a folder) or config (random start)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, such as llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError(
                "a model with config needs a tokenizer (a hub id or a folder; "
                "megatrain.data.train_bpe_tokenizer makes one of text files)"
            )
        return self


class DataSection(Section):
    """What it is trained on; `megatrain.data.formats` has the formats.

    `fields`: our name of a field -> its name in the data; null: passed over on purpose.
    `bad_rows`: end at the first row that cannot be used, or leave such rows out and list them.
    `weights`: shares of the tokens, one for each path. So that they hold, larger sources are taken
    in part, or with `repeat` smaller ones more than once.
    """

    kind: Literal["auto", "text", "chat"] = "auto"
    path: Name | list[Name]
    sequence_length: Annotated[int, Field(ge=2)]
    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = None
    repeat: bool = False
    eval_path: Name | list[Name] | None = None
    eval_fraction: Fraction = 0.0
    packing: bool = True
    text_field: str = "text"
    fields: dict[str, str | None] = Field(default_factory=dict)
    bad_rows: Literal["stop", "skip"] = "stop"
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    hub_config: str | None = None
    hub_split: str = "train"
    cache_dir: Name | None = None

    @model_validator(mode="after")
    def _one_evaluation_source(self) -> Self:
        if self.eval_path is not None and self.eval_fraction:
            raise ValueError("give eval_path or eval_fraction, not both")
        return self

    @model_validator(mode="after")
    def _weights_of_paths(self) -> Self:
        number = len(self.path) if isinstance(self.path, list) else 1
        if self.weights is not None and len(self.weights) != number:
            raise ValueError(f"give as many weights as paths: {number}, not {len(self.weights)}")
        if self.repeat and self.weights is None:
            raise ValueError("repeat needs weights: only sources with weights are repeated")
        if self.repeat and self.eval_fraction:
            raise ValueError(
                "give eval_path instead of eval_fraction: with repeat, what is held out would be "
                "trained on, too"
            )
        return self


class OptimizerSection(Section):
    """A rule of `megatrain.optim` and its settings; null: as the rule has it, or it has none.

    `no_decay`: patterns of names that do not decay, besides LayerNorms; null: norms and biases.
    """

    name: str = "adamw"
    lr: Annotated[float, Field(gt=0)] | None = None
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    no_decay: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, given: Any) -> Any:
        """The rule's own values where none is given."""
        from megatrain.optim import RULES

        rule = RULES.get(str(given.get("name", "adamw"))) if isinstance(given, dict) else None
        if rule is None:
            return given  # refused below
        own = {name: getattr(rule(), name) for name in rule.settings}
        foreign = cls.model_fields.keys() - own.keys() - {"name", "no_decay"}
        for name in sorted(foreign):
            if given.get(name) is not None:
                raise ValueError(f"{rule.name} has no {name}; it has {', '.join(own)}")
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
        return plain | {name: value for name, value in given.items() if value is not None}

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from megatrain.optim import RULES

        if name not in RULES:
            raise ValueError(f"unknown optimizer {name!r}{nearest(name, list(RULES))}")
        return name

    @field_validator("no_decay")
    @classmethod
    def _patterns(cls, patterns: list[str] | None) -> list[str] | None:
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return patterns

    @property
    def settings(self) -> dict[str, Any]:
        """The rule's settings as the groups of torch's optimizer hold them."""
        from megatrain.optim import RULES

        values = {name: getattr(self, name) for name in RULES[self.name].settings}
        return {n: tuple(each) if isinstance(each, list) else each for n, each in values.items()}

    def rule(self) -> "Rule":
        """The optimizer as `Engine` takes it."""
        from megatrain.optim import RULES

        given = {} if self.no_decay is None else {"no_decay": self.no_decay}
        return RULES[self.name](**self.settings, **given)


class LossSection(Section):
    """Cross entropy, of whose targets a share may be spread evenly over the vocabulary."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


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
        if self.options and self.name in ("constant", "constant_with_warmup"):
            raise ValueError(f"{self.name} takes no options")
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        return self.warmup_steps or 0


class TrainingSection(Section):
    """How long and in what portions. `batch_size` and `micro_batch_size` count rows.

    `on_nonfinite`: what to do when loss or gradient norm is not finite, before any weight is
    changed: end the run, or leave the step out and go on; `max_skips` steps in a row end it, too.
    `spike`: gradient norms above this many times the median of the last steps are treated alike.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    eval_every: Positive | None = None
    seed: Natural = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: Positive = 10
    spike: Annotated[float, Field(gt=1)] | None = None

    @model_validator(mode="after")
    def _refusals_need_clipping(self) -> Self:
        refuses = self.on_nonfinite == "skip" or self.spike is not None
        if refuses and self.max_grad_norm is None:
            name = "spike" if self.spike is not None else "on_nonfinite: skip"
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


class EngineSection(Section):
    """Where and how the step is computed."""

    precision: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"
    placement: Literal["auto"] | dict[str, Any] = "auto"
    device_memory: str | Positive | None = None
    host_memory: str | Positive | None = None

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _size(cls, size: str | int | None) -> str | int | None:
        if size is not None and parse_bytes(size) <= 0:
            raise ValueError(f"should be a size above zero, got {shown(size)}")
        return size

    @field_validator("device")
    @classmethod
    def _device_name(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
            raise ValueError(f"should be auto, cpu, cuda or cuda:N, got {shown(name)}")
        return name

    @field_validator("placement")
    @classmethod
    def _placement_fields(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if not isinstance(value, dict):
            return value
        # A run file has lists only.
        value = {n: tuple(each) if isinstance(each, list) else each for n, each in value.items()}
        _check_placement(value)
        return value

    def placement_value(self) -> Literal["auto"] | Placement:
        """The placement as `Engine` takes it."""
        return Placement(**self.placement) if isinstance(self.placement, dict) else "auto"


class CheckpointSection(Section):
    """When the run's whole state is saved below its folder, for `--resume`.

    A run that is stopped by a signal is always saved, and SIGUSR1 saves at once.

    `every`: steps between two saves; null: none. `at_end`: after the last step, so that the run
    can be made longer. `keep`: the newest ones that stay; those at multiples of `keep_every` steps
    stay for ever.
    """

    every: Positive | None = 500
    at_end: bool = True
    keep: Positive = 2
    keep_every: Positive | None = None


class OutputSection(Section):
    """Where the run is written: `folder`, or a new `runs/<name>-<time>` when it is null.

    One early step is recorded for `timeline.json`, with `timeline_every` also each N-th one. A
    recorded step's times by stream and reasons to wait are in `metrics.jsonl`.
    """

    folder: Name | None = None
    log_every: Positive = 10
    timeline_every: Annotated[int, Field(ge=2)] | None = None


class Config(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    loss: LossSection = LossSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()

    def as_yaml(self) -> str:
        """The resolved run file: every key, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or the valid names where none is near and they fit in a line."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid are {', '.join(known)}" if len(known) <= 16 else ""


def shown(value: Any) -> str:
    """A value as it appears in a message: its beginning when it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_placement(choices: dict[str, Any]) -> None:
    """Placement checks values, not types; a run file needs both."""
    hints = get_type_hints(Placement)
    for name, value in choices.items():
        if name in RENAMED:
            raise ValueError(f"{name!r} is now called {RENAMED[name]!r}")
        if name not in hints:
            raise ValueError(f"unknown key {name!r}{nearest(str(name), Placement.names())}")
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Input ").replace("valid tuple", "list")
            raise ValueError(f"{name} {problem}, got {shown(value)}") from error
    try:
        Placement(**choices)
    except InputError as error:
        raise ValueError(str(error).removeprefix("placement.")) from error
