"""The sections of a run file, with the defaults and possible values of their keys."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from megatrain.base.units import parse_bytes
from megatrain.config import learning
from megatrain.config.section import Fraction, Name, Pattern, Positive, Section, nearest, shown
from megatrain.errors import InputError
from megatrain.placement import Placement, Precision, Verify, old_name


class ModelSection(Section):
    """The model that is trained: a pretrained `path`, or a `config` to be randomly initialised.

    `chat_template`: a Jinja file; it and `eos_token` replace the tokenizer's, also in the folder
    that is written. `base`: the format of frozen linear layers (docs/adapters.md). `freeze`,
    `train_only`: regular expressions of parameters' names.
    """

    path: Name | None = None
    config: dict[str, Any] | None = None
    tokenizer: Name | None = None
    chat_template: Name | None = None
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    freeze: list[Pattern] = Field(default_factory=list)
    train_only: Annotated[list[Pattern], Field(min_length=1)] | None = None
    base: Literal["bf16", "fp8", "nf4", "folder"] = "bf16"
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    router_z_loss_coef: Annotated[float, Field(ge=0)] | None = None
    router_bias_update: Annotated[float, Field(ge=0)] | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    @property
    def routers(self) -> dict[str, float | None]:
        names = ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update")
        return {name: getattr(self, name) for name in names}

    def problems(self) -> Iterator[str]:
        if (self.path is None) == (self.config is None):
            yield "give either path (a hub id or a folder) or config (random start)"
        if self.config is None:
            return
        if not isinstance(self.config.get("model_type"), str):
            yield "config needs a model_type, such as llama"
        if self.tokenizer is None:
            yield (
                "a model with config needs a tokenizer (a hub id or a folder; "
                "megatrain.data.train_bpe_tokenizer makes one of text files)"
            )


class DataSection(Section):
    """The training and evaluation data (docs/data.md).

    `fields`: our name of a field -> its name in the data; null: the field is ignored on purpose.
    `weights`: shares of the tokens, one for each path. `eval_path`: one set, or several by name.
    """

    kind: Literal["auto", "text", "chat"] = "auto"
    path: Name | list[Name]
    sequence_length: Annotated[int, Field(ge=2)]
    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = None
    repeat: bool = False
    eval_path: Name | list[Name] | dict[str, Name | list[Name]] | None = None
    eval_fraction: Fraction = 0.0
    packing: bool = True
    fields: dict[str, str | None] = Field(default_factory=dict)
    bad_rows: Literal["stop", "skip"] = "stop"
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    hub_config: str | None = None
    hub_split: str = "train"
    cache_dir: Name | None = None

    @field_validator("path", "eval_path")
    @classmethod
    def _some_path(cls, paths: Any) -> Any:
        if paths == {}:
            raise ValueError("names no set")
        for name, of_set in paths.items() if isinstance(paths, dict) else [(None, paths)]:
            if of_set == []:
                problem = "there is no path" if name is None else f"the set {name!r} has no path"
                raise ValueError(f"{problem}: name at least one file, folder or glob")
            if name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError(f"name a set with letters, digits, _, . or -; got {shown(name)}")
        return paths

    @property
    def eval_sets(self) -> dict[str, str | list[str]]:
        """Paths of evaluation sets by name; a single set has the empty name."""
        if self.eval_path is None or isinstance(self.eval_path, dict):
            return dict(self.eval_path or {})
        return {"": self.eval_path}

    def problems(self) -> Iterator[str]:
        if self.eval_path is not None and self.eval_fraction:
            yield "give eval_path or eval_fraction, not both"
        if self.repeat and self.eval_fraction:
            yield "give eval_path instead of eval_fraction: repeated rows would be held out, too"
        if self.repeat and self.weights is None:
            yield "repeat needs weights: only sources with weights are repeated"
        number = len(self.path) if isinstance(self.path, list) else 1
        if self.weights is not None and len(self.weights) != number:
            yield f"give as many weights as paths: {number}, not {len(self.weights)}"


class EngineSection(Section):
    """The device, and how the step is computed on it (docs/planning.md, docs/distributed.md).

    `disk`: a folder for planes on a disk, which take `disk_space` bytes at most. `sharding`, on
    several hosts: each keeps the whole model (`hybrid`), or all of them share it (`full`).
    `sequence_parallel`: the number of devices that share every row.
    """

    precision: Precision = "bf16"
    device: str = "auto"
    placement: Literal["auto"] | dict[str, Any] = "auto"
    device_memory: str | Positive | None = None
    host_memory: str | Positive | None = None
    disk: Name | None = None
    disk_space: str | Positive | None = None
    devices: Positive = 1
    sharding: Literal["hybrid", "full"] = "hybrid"
    sequence_parallel: Positive = 1
    verify: Verify = "save"

    @field_validator("verify", mode="before")
    @classmethod
    def _off(cls, verify: Any) -> Any:
        return "off" if verify is False else verify  # YAML 1.1 reads a plain off as False

    @field_validator("device_memory", "host_memory", "disk_space", mode="before")
    @classmethod
    def _size(cls, size: Any) -> Any:
        if size is not None:
            parse_bytes(size)
        return size

    @field_validator("device")
    @classmethod
    def _device_name(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", name):
            raise ValueError(f"should be auto, cpu, cuda, cuda:N or mps, got {shown(name)}")
        return name

    @field_validator("placement", mode="before")
    @classmethod
    def _auto_or_choices(cls, value: Any) -> Any:
        if value == "auto":
            return value
        if not isinstance(value, dict):
            raise ValueError(f"should be auto, or choices such as {{slots: 2}}, got {shown(value)}")
        # A run file has lists where a placement has tuples.
        value = {n: tuple(v) if isinstance(v, list) else v for n, v in value.items()}
        names = Placement.names()
        for name in value:
            if (reason := old_name(str(name))) is not None:
                raise ValueError(reason)
            if name not in names:
                raise ValueError(f"unknown key {name!r}{nearest(str(name), names)}")
        try:
            Placement(**value)
        except InputError as error:
            raise ValueError(str(error).removeprefix("placement.")) from error
        return value

    def problems(self) -> Iterator[str]:
        if self.devices > 1 and (":" in self.device or self.device == "mps"):
            yield f"{self.devices} devices cannot all be {self.device}; take cuda"
        if self.disk is None and self.disk_space is not None:
            yield "disk_space needs disk: a folder on the disk"
        choices = self.placement if isinstance(self.placement, dict) else {}
        for name in ("disk_moments", "disk_remainder", "disk_weights"):
            if self.disk is None and choices.get(name):
                yield f"placement.{name} needs disk: a folder on the disk"

    def placement_value(self) -> Literal["auto"] | Placement:
        """The placement as `Engine` takes it."""
        return Placement(**self.placement) if isinstance(self.placement, dict) else "auto"


class CheckpointSection(Section):
    """The steps after which the run's whole state is saved, for `--resume` (docs/reliability.md).

    `best`: an evaluation's metric; the state with its best value is kept. `load_best`: `model/` is
    written from that state, not from the last one.
    """

    every: Positive | None = 500
    at_end: bool = True
    keep: Positive = 2
    keep_every: Positive | None = None
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    load_best: bool = False

    def problems(self) -> Iterator[str]:
        for name in ("mode", "load_best"):
            if getattr(self, name) and self.best is None:
                yield f"{name} needs best: the metric, such as eval_loss"
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            yield f"keep_every is {self.keep_every}; it must be a multiple of every ({self.every})"


class OutputSection(Section):
    """The run's folder: `folder`, or a new `runs/<name>-<time>` when it is null.

    One early step is recorded for `timeline.json`.
    """

    folder: Name | None = None
    log_every: Positive = 10


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class TrackingSection(Section):
    """Trackers that get the same values as `metrics.jsonl` (docs/training.md).

    Nothing leaves the machine unless `online` is true. `options`: arguments of a library's start.
    """

    to: Tracker | list[Tracker] = Field(default_factory=list)
    project: Name = "megatrain"
    run_name: Name | None = None
    online: bool = False
    options: dict[Tracker, dict[str, Any]] = Field(default_factory=dict)

    @property
    def trackers(self) -> list[Tracker]:
        return list(dict.fromkeys(self.to if isinstance(self.to, list) else [self.to]))

    def problems(self) -> Iterator[str]:
        for name in self.options:
            if name not in self.trackers:
                yield f"options are given for {name}, which is not in tracking.to"


class Config(Section):
    """A whole run file."""

    model: ModelSection
    adapter: learning.AdapterSection = learning.AdapterSection()
    data: DataSection
    training: learning.TrainingSection
    optimizer: learning.OptimizerSection = learning.OptimizerSection()
    loss: learning.LossSection = learning.LossSection()
    rollout: learning.RolloutSection = learning.RolloutSection()
    schedule: learning.ScheduleSection = learning.ScheduleSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()
    tracking: TrackingSection = TrackingSection()

    def problems(self) -> Iterator[str]:
        """Messages for values of different sections that contradict each other."""
        yield from self._loss_problems()
        yield from self._rollout_problems()
        precision, training = self.engine.precision, self.training
        if self.adapter.method is not None and self.model.path is None:
            yield "adapter needs model.path: a base that can be loaded again"
        if self.model.base != "bf16" and precision == "fp32":
            base = self.model.base
            yield f"model.base {base} needs engine.precision bf16 or fp8, not fp32; set one to bf16"
        if self.optimizer.ns_precision == "fp32" and precision != "fp32":
            yield "optimizer.ns_precision fp32 needs engine.precision fp32; take bf16"
        if training.refuses is not None and not self.updates_wait_for_the_norm:
            yield (
                f"training.{training.refuses} needs updates that wait for the norm, and those of "
                f"layers do not with {self.optimizer.name}; leave it out, or set optimizer.clip: "
                "all"
            )
        yield from self._metric_problems()

    def _loss_problems(self) -> Iterator[str]:
        data, name, kind = self.data, f"loss.name {self.loss.name}", self.loss.kind
        shares_rows = self.engine.sequence_parallel > 1
        if kind not in (None, "prompts") and data.kind != "auto":
            yield f"{name} cannot have data.kind; leave it out"
        if kind is not None and data.weights:
            yield f"{name} cannot have data.weights; leave it out"
        if self.loss.name == "dpo" and self.adapter.init_lora_weights is False:
            key = "adapter.init_lora_weights false"
            yield f"{name} cannot have {key}: the reference is the base; leave it out"
        if kind == "anchors" and self.training.batch_size == 1 and not self.loss.negatives:
            remedy = "raise training.batch_size"
            yield f"{name} cannot have one row a step without loss.negatives: {remedy}"
        if shares_rows and data.packing:
            yield "engine.sequence_parallel cannot have data.packing (set it to false) yet"
        if shares_rows and (kind is not None or self.loss.name == "distill"):
            yield f"engine.sequence_parallel cannot have {name} yet"

    def _rollout_problems(self) -> Iterator[str]:
        loss, rollout, length = self.loss, self.rollout, self.data.sequence_length
        if loss.kind != "prompts":
            if rollout != learning.RolloutSection():
                yield f"rollout is for loss.name grpo, and this is {loss.name}"
            return
        if not rollout.rewards:
            yield f"loss.name {loss.name} needs rollout.rewards: functions, as [rewards.py:reward]"
        if (longest := loss.max_completion_length or 0) >= length:
            yield (
                f"data.sequence_length ({length}) is of a prompt and its reply together: it must "
                f"be above loss.max_completion_length ({longest})"
            )

    @property
    def updates_wait_for_the_norm(self) -> bool:
        """True if a step changes no weight before its gradient norm is known."""
        directs = self.optimizer.rule().directing and self.optimizer.clip != "all"
        return self.training.max_grad_norm is not None and not directs

    def _metric_problems(self) -> Iterator[str]:
        sets = ["", *(f"{name}_" for name in self.data.eval_sets if name)]
        evaluates = self.data.eval_path is not None or self.data.eval_fraction
        kinds, every = self.loss.metrics if evaluates else (), self.training.eval_every
        metrics = [f"eval_{name}{kind}" for name in sets for kind in kinds]
        needed = "data.eval_path or data.eval_fraction"
        watched = {"checkpoint.best": self.checkpoint.best}
        if self.training.early_stopping is not None:
            watched["training.early_stopping"] = self.watched
        for key, metric in watched.items():
            if metric is not None and not (metrics and every):
                yield f"{key} needs evaluations: set training.eval_every, and {needed}"
            elif metric is not None and metric not in metrics:
                yield f"{key}: there is no {metric!r}{nearest(metric, metrics)}"
        if every is not None and not metrics:
            yield (
                f"training.eval_every is {every}, but there is nothing to evaluate: set {needed}, "
                "or leave eval_every out"
            )

    @property
    def watched(self) -> str:
        """The metric that decides the best state and early stopping."""
        return self.checkpoint.best or f"eval_{self.loss.metrics[0]}"

    @property
    def larger_is_better(self) -> bool:
        """True if large values of the `watched` metric are good."""
        mode = self.checkpoint.mode
        good_if_large = ("accuracy", "accuracies", "margins", "chosen", "reward")
        return self.watched.endswith(good_if_large) if mode is None else mode == "max"

    def as_yaml(self) -> str:
        """The run file as YAML, with every key, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
