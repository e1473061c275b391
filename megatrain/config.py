"""The run file: YAML in, one validated and frozen value out.

Precedence: defaults < file < `--set path=value`. Every mistake is an InputError of one line
that names the file, the key and, for a misspelt key, the nearest valid one.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from megatrain.errors import InputError
from megatrain.placement import Placement
from megatrain.units import MIB

MAX_FILE_BYTES = 1 * MIB
MAX_NESTING = 16

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """One section of the run file; strict, so that `"8"` is not quietly taken for `8`."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ModelSection(Section):
    """What is trained: a pretrained `path`, or a `config` to be randomly initialised."""

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either path (a hub id or a folder) or config (random start)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, such as llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model with config needs a tokenizer (a hub id or a folder)")
        return self


class DataSection(Section):
    """What it is trained on; `megatrain.data` documents the formats."""

    kind: Literal["text", "chat"]
    path: str | list[str]
    sequence_length: Annotated[int, Field(ge=2)]
    eval_path: str | list[str] | None = None
    eval_fraction: Fraction = 0.0
    packing: bool = True
    text_field: str = "text"
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    hub_config: str | None = None
    hub_split: str = "train"
    cache_dir: str | None = None

    @model_validator(mode="after")
    def _one_evaluation_source(self) -> Self:
        if self.eval_path is not None and self.eval_fraction:
            raise ValueError("give eval_path or eval_fraction, not both")
        return self


class OptimizerSection(Section):
    """AdamW with decoupled weight decay."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


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
        if self.options and self.name in ("constant", "constant_with_warmup"):
            raise ValueError(f"{self.name} takes no options")
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        return self.warmup_steps or 0


class TrainingSection(Section):
    """How long and in what portions. `batch_size` and `micro_batch_size` count rows."""

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    eval_every: Positive | None = None
    seed: Natural = 0

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

    @field_validator("device")
    @classmethod
    def _device_name(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
            raise ValueError(f"should be auto, cpu, cuda or cuda:N, got {_shown(name)}")
        return name

    @field_validator("placement")
    @classmethod
    def _placement_fields(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(value, dict):
            _check_placement(value)
        return value

    def placement_value(self) -> Literal["auto"] | Placement:
        """The placement as `Engine` takes it."""
        return Placement(**self.placement) if isinstance(self.placement, dict) else "auto"


class OutputSection(Section):
    """Where the run is written: `folder`, or a new `runs/<name>-<time>` when it is null."""

    folder: str | None = None
    log_every: Positive = 10


class Config(Section):
    """A whole run."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()

    def as_yaml(self) -> str:
        """The resolved run file: every key, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run file and apply `overrides` (`path.to.key=value`, the value in YAML).

    Raises:
        InputError: the file cannot be read or is not a valid run file.
    """
    tree = read_yaml(Path(path))
    overridden = [_apply_override(tree, text) for text in overrides]
    return validate(tree, str(path), overridden)


def validate(tree: Mapping[str, Any], source: str, overridden: Iterable[str] = ()) -> Config:
    """`tree` as a Config; `source` and the `overridden` keys serve the message only.

    Raises:
        InputError: an unknown key, a wrong type or an impossible value.
    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        details = error.errors(include_url=False)
        # An unknown key is the likeliest cause of the others (a misspelt one is also missing).
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        others = len({tuple(_keys(detail)) for detail in details}) - 1
        more = f" (and {others} more)" if others else ""
        raise InputError(_describe(details[0], source, set(overridden)) + more) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, with bounded size and nesting, without aliases or repeated keys.

    Raises:
        InputError: the file cannot be read or is not such a mapping.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a run file")
    try:
        tree = parse_yaml(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a mapping of sections such as model, data and training")
    return tree


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        ValueError: malformed, nested too deep, with aliases or with repeated keys; in one line.
    """
    try:
        _refuse_bombs(text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{place}not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from error


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or the valid names where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid are {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and reads `1e-5` as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key is not a name", key.start_mark)
            if key.value in seen:
                problem = f"key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _refuse_bombs(text: str) -> None:
    """Look at the events only: nothing is built before aliases and depth are known harmless."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {event.start_mark.line + 1}: aliases are not supported")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise ValueError(f"line {event.start_mark.line + 1}: nested too deep")


def _check_placement(choices: dict[str, Any]) -> None:
    """Placement checks values, not types; a run file needs both."""
    hints = get_type_hints(Placement)
    for name, value in choices.items():
        if name not in hints:
            raise ValueError(f"unknown key {name!r}{nearest(str(name), Placement.names())}")
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Input ")
            raise ValueError(f"{name} {problem}, got {_shown(value)}") from error
    try:
        Placement(**choices)
    except InputError as error:
        raise ValueError(str(error).removeprefix("placement.")) from error


def _apply_override(tree: dict[str, Any], text: str) -> str:
    """Set one `path.to.key=value` in `tree`; returns the path."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text}: write it as path.to.key=value")
    node = tree
    for key in keys[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    try:
        node[keys[-1]] = parse_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {text}: {error}") from error
    return path.strip()


def _describe(detail: ErrorDetails, source: str, overridden: set[str]) -> str:
    path = ".".join(_keys(detail))
    place = f"--set {path}" if path in overridden else f"{source}: {path}" if path else source
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key{_nearest_key(*_keys(detail))}"
    if detail["type"] == "missing":
        return f"{place}: missing"
    if detail["type"] == "value_error":
        return f"{place}: {detail['ctx']['error']}"
    if detail["type"] == "model_type":
        return f"{place}: should be a mapping, got {_shown(detail['input'])}"
    message = detail["msg"].removeprefix("Input ").replace("valid dictionary", "mapping")
    return f"{place}: {message}, got {_shown(detail['input'])}"


def _keys(detail: ErrorDetails) -> list[str]:
    """Section and key; what pydantic adds below (list index, arm of a union) is not in the file."""
    return [str(item) for item in detail["loc"][:2]]


def _nearest_key(first: str, second: str | None = None) -> str:
    sections = {name: list(_section(name).model_fields) for name in Config.model_fields}
    name = second or first
    elsewhere = [f"{section}.{name}" for section, keys in sections.items() if name in keys]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    return nearest(name, sections[first] if second else list(sections))


def _section(name: str) -> type[Section]:
    annotation = Config.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
