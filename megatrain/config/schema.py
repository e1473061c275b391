"""The sections of a run file, their defaults and what values are possible."""

import re
from typing import Annotated, Any, Literal, Self, get_type_hints

import yaml
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from megatrain.base.units import parse_bytes
from megatrain.config.adapter import AdapterSection
from megatrain.config.learning import (
    LossSection,
    OptimizerSection,
    ScheduleSection,
    TrainingSection,
)
from megatrain.config.model import ModelSection
from megatrain.config.rollout import RolloutSection, check_rollout
from megatrain.config.section import Fraction, Name, Positive, Section, nearest, shown
from megatrain.errors import InputError
from megatrain.placement import RENAMED, Placement, Precision, Verify


class DataSection(Section):
    """What it is trained on; `megatrain.data.formats` has the formats.

    `fields`: our name of a field -> its name in the data; null: passed over on purpose.
    `bad_rows`: end at the first row that cannot be used, or leave such rows out and list them.
    `weights`: shares of the tokens, one for each path. So that they hold, larger sources are taken
    in part, or with `repeat` smaller ones more than once.
    `streaming`: make tokens as they are needed and keep none, for sources that do not fit the disk;
    `shuffle_buffer` tokens of them are shuffled together.
    `eval_path`: also several sets, by names that their metrics have.
    """

    kind: Literal["auto", "text", "chat"] = "auto"
    path: Name | list[Name]
    sequence_length: Annotated[int, Field(ge=2)]
    weights: list[Annotated[float, Field(gt=0, le=1e6)]] | None = None
    repeat: bool = False
    streaming: bool = False
    shuffle_buffer: Annotated[int, Field(ge=1024, le=2**32)] = 4 << 20
    eval_path: Name | list[Name] | dict[str, Name | list[Name]] | None = None
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

    @field_validator("path", "eval_path")
    @classmethod
    def _some_path(cls, given: Any) -> Any:
        for name, paths in given.items() if isinstance(given, dict) else [("", given)]:
            if paths == []:
                which = f"the set {name!r} has no path" if name else "there is no path"
                raise ValueError(f"{which}: name at least one file, folder or glob")
        return given

    @field_validator("eval_path")
    @classmethod
    def _names_of_sets(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError(f"name a set with letters, digits, _, . or -; got {shown(name)}")
        if given == {}:
            raise ValueError("names no set")
        return given

    @property
    def eval_sets(self) -> dict[str, str | list[str]]:
        """Paths of evaluation sets by name; a single set's is empty."""
        if self.eval_path is None or isinstance(self.eval_path, dict):
            return dict(self.eval_path or {})
        return {"": self.eval_path}

    @model_validator(mode="after")
    def _whole_sources(self) -> Self:
        if self.streaming and self.weights is not None:
            raise ValueError("streaming takes sources as they come: leave weights out")
        if self.streaming and self.eval_fraction:
            raise ValueError("give eval_path instead of eval_fraction: a stream has no known end")
        usual = type(self).model_fields["shuffle_buffer"].default
        if not self.streaming and self.shuffle_buffer != usual:
            raise ValueError("shuffle_buffer needs streaming: other data are shuffled as a whole")
        return self

    @model_validator(mode="after")
    def _one_field_of_texts(self) -> Self:
        if (
            self.text_field != "text"
            and self.fields.get("text", self.text_field) != self.text_field
        ):
            raise ValueError("text_field and fields name two fields of texts: keep one")
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


class EngineSection(Section):
    """Where and how the step is computed.

    `disk`: a folder on a fast disk, where planes may rest while the run goes on, in a file without
    a name; `disk_space` at most, null: what is free. `devices`: as many processes, each with a
    device of its own, train the model together, unless torchrun has started others. `sharding`, on
    several hosts: `hybrid`: each host keeps the whole model, `full`: all of them keep it once.
    `sequence_parallel`: all devices share every row, each with a part of its tokens, if this is
    their number; 1: each has rows of its own. `verify`: when weights, states and gradients are
    compared with their checksums: in each `step`, in each `save`, or never.
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

    @field_validator("device_memory", "host_memory", "disk_space", mode="before")
    @classmethod
    def _size(cls, size: Any) -> Any:
        if size is not None and type(size) not in (str, int):
            raise ValueError(f"should be a size, such as 10GiB, got {shown(size)}")
        if size is not None and parse_bytes(size) <= 0:
            raise ValueError(f"should be a size above zero, got {shown(size)}")
        return size

    @field_validator("device")
    @classmethod
    def _device_name(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
            raise ValueError(f"should be auto, cpu, cuda or cuda:N, got {shown(name)}")
        return name

    @field_validator("placement", mode="before")
    @classmethod
    def _auto_or_choices(cls, value: Any) -> Any:
        if value != "auto" and not isinstance(value, dict):
            raise ValueError(f"should be auto, or choices such as {{slots: 2}}, got {shown(value)}")
        return value

    @field_validator("placement")
    @classmethod
    def _placement_fields(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if not isinstance(value, dict):
            return value
        # A run file has lists only.
        value = {n: tuple(each) if isinstance(each, list) else each for n, each in value.items()}
        _check_placement(value)
        return value

    @model_validator(mode="after")
    def _device_of_each_process(self) -> Self:
        if self.devices > 1 and ":" in self.device:
            raise ValueError(f"{self.devices} devices cannot all be {self.device}; take cuda")
        return self

    @model_validator(mode="after")
    def _disk_of_planes(self) -> Self:
        if self.disk is None and self.disk_space is not None:
            raise ValueError("disk_space needs disk: a folder on the disk")
        there = self.placement if isinstance(self.placement, dict) else {}
        for name in ("disk_moments", "disk_remainder", "disk_weights"):
            if self.disk is None and there.get(name):
                raise ValueError(f"placement.{name} needs disk: a folder on the disk")
        return self

    def placement_value(self) -> Literal["auto"] | Placement:
        """The placement as `Engine` takes it."""
        return Placement(**self.placement) if isinstance(self.placement, dict) else "auto"


class CheckpointSection(Section):
    """When the run's whole state is saved below its folder, for `--resume`.

    A run that is stopped by a signal is always saved, and SIGUSR1 saves at once.

    `every`: steps between two saves; null: none. `at_end`: after the last step, so that the run
    can be made longer. `keep`: the newest ones that stay; those at multiples of `keep_every` steps
    stay for ever. `best`: an evaluation's metric, whose best state is saved and stays, too; `mode`
    says whether small or large is good, null: large of accuracies. `load_best`: `model/` is that
    of the best state, not of the last.
    """

    every: Positive | None = 500
    at_end: bool = True
    keep: Positive = 2
    keep_every: Positive | None = None
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    load_best: bool = False

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        for name in ("mode", "load_best"):
            if getattr(self, name) and self.best is None:
                raise ValueError(f"{name} needs best: the metric, such as eval_loss")
        return self


class OutputSection(Section):
    """Where the run is written: `folder`, or a new `runs/<name>-<time>` when it is null.

    One early step is recorded for `timeline.json`, with `timeline_every` also each N-th one. A
    recorded step's times by stream and reasons to wait are in `metrics.jsonl`.
    """

    folder: Name | None = None
    log_every: Positive = 10
    timeline_every: Annotated[int, Field(ge=2)] | None = None


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class TrackingSection(Section):
    """Trackers that get what `metrics.jsonl` gets, under the names `train/...` and `eval/...`.

    `run_name`: null: that of the run's folder. Nothing leaves the machine unless `online` is true:
    then each library's own settings say where to. `options`: further arguments of a library's own
    start, by tracker.
    """

    to: Tracker | list[Tracker] = Field(default_factory=list)
    project: Name = "megatrain"
    run_name: Name | None = None
    online: bool = False
    options: dict[Tracker, dict[str, Any]] = Field(default_factory=dict)

    @property
    def trackers(self) -> list[Tracker]:
        """Their names, each once."""
        return list(dict.fromkeys(self.to if isinstance(self.to, list) else [self.to]))

    @model_validator(mode="after")
    def _options_of_trackers(self) -> Self:
        for name in self.options:
            if name not in self.trackers:
                raise ValueError(f"options are given for {name}, which is not in tracking.to")
        return self


class Config(Section):
    """A whole run."""

    model: ModelSection
    adapter: AdapterSection = AdapterSection()
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    loss: LossSection = LossSection()
    rollout: RolloutSection = RolloutSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def eval_metrics(self) -> list[str]:
        """What evaluations measure, over all sets and of each named one; empty without any."""
        data = self.data
        sets = ["", *(f"{name}_" for name in data.eval_sets if name)]
        there = data.eval_path is not None or data.eval_fraction
        kinds = self.loss.metrics if there else ()
        return [f"eval_{each}{kind}" for each in sets for kind in kinds]

    @model_validator(mode="after")
    def _sections_together(self) -> Self:
        """What no section can know alone; all problems are said at once."""
        problems = []
        for check in (
            self._data_of_a_loss,
            self._rows_that_ranks_share,
            self._base_of_an_adapter,
            self._length_of_a_stream,
            self._products_of_a_precision,
            self._refusals_wait_for_the_norm,
            self._watched_metrics,
        ):
            try:
                check()
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _data_of_a_loss(self) -> None:
        check_rollout(self.rollout, self.loss, self.data.sequence_length)
        data, scores = self.data, self.loss.name == "reward"
        for key, given in {
            "data.kind": data.kind != "auto" and self.loss.kind != "prompts",
            "data.weights": data.weights,
            "data.streaming": data.streaming,
            "data.text_field": data.text_field != "text",
            "training.samples": scores and self.training.samples,
            "training.neftune_alpha": self.loss.kind == "prompts" and self.training.neftune_alpha,
        }.items():
            if given and self.loss.kind is not None:
                raise ValueError(f"loss.name {self.loss.name} cannot have {key}; leave it out")
        if data.streaming and self.loss.teacher_log_probs == "kept":
            raise ValueError("data.streaming keeps nothing: set loss.teacher_log_probs: streamed")

    def _rows_that_ranks_share(self) -> None:
        for key, given in {
            "data.packing (set it to false)": self.data.packing,
            "training.samples": self.training.samples,
            "training.neftune_alpha": self.training.neftune_alpha,
            f"loss.name {self.loss.name}": self.loss.kind or self.loss.name == "distill",
        }.items():
            if self.engine.sequence_parallel > 1 and given:
                raise ValueError(f"engine.sequence_parallel cannot have {key} yet")

    def _base_of_an_adapter(self) -> None:
        if self.adapter.method is None:
            return
        if self.model.path is None:
            raise ValueError("adapter needs model.path: a base that can be loaded again")
        if self.engine.precision == "fp8":
            raise ValueError("adapter: engine.precision fp8 is not supported with it; take bf16")

    def _length_of_a_stream(self) -> None:
        if self.data.streaming and self.training.steps is None:
            raise ValueError("data.streaming needs training.steps: an epoch's length is not known")

    def _products_of_a_precision(self) -> None:
        if self.model.base != "bf16" and self.engine.precision != "bf16":
            raise ValueError(
                f"model.base {self.model.base} needs engine.precision bf16, not "
                f"{self.engine.precision}; set one of them to bf16"
            )
        if self.optimizer.ns_precision == "fp32" and self.engine.precision != "fp32":
            raise ValueError("optimizer.ns_precision fp32 needs engine.precision fp32; take bf16")

    @property
    def updates_wait_for_the_norm(self) -> bool:
        """True if no weight changes in a step before its gradient norm is known."""
        directs = self.optimizer.rule().directing and self.optimizer.clip != "all"
        return self.training.max_grad_norm is not None and not directs

    def _refusals_wait_for_the_norm(self) -> None:
        name = self.training.refuses
        if name is not None and not self.updates_wait_for_the_norm:
            raise ValueError(
                f"training.{name} needs updates that wait for the norm, and those of layers do not "
                f"with {self.optimizer.name}; leave it out, or set optimizer.clip: all"
            )

    def _watched_metrics(self) -> None:
        metrics, every = self.eval_metrics, self.training.eval_every
        wanted = {"checkpoint.best": self.checkpoint.best}
        if self.training.early_stopping is not None:
            wanted["training.early_stopping"] = self.watched
        if self.training.samples is not None:
            wanted["training.samples"] = f"eval_{self.loss.metrics[0]}"
        for key, metric in wanted.items():
            if metric is not None and not (metrics and every):
                raise ValueError(
                    f"{key} needs evaluations: set training.eval_every, and data.eval_path or "
                    "data.eval_fraction"
                )
            if metric is not None and metric not in metrics:
                raise ValueError(f"{key}: there is no {metric!r}{nearest(metric, metrics)}")
        if every is not None and not metrics:
            raise ValueError(
                f"training.eval_every is {every}, but there is nothing to evaluate: set "
                "data.eval_path or data.eval_fraction, or leave eval_every out"
            )

    @property
    def watched(self) -> str:
        """The metric of the best state and of early stopping."""
        return self.checkpoint.best or f"eval_{self.loss.metrics[0]}"

    @property
    def larger_is_better(self) -> bool:
        """Whether large values of that metric are good."""
        mode = self.checkpoint.mode
        large = ("accuracy", "accuracies", "margins", "chosen", "reward")
        return self.watched.endswith(large) if mode is None else mode == "max"

    def as_yaml(self) -> str:
        """The resolved run file: every key, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
