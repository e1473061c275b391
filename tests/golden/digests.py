"""What a change that only moves or renames code must not alter, in digests and texts."""

import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any
from unittest import mock

import typer
from pydantic import BaseModel

import megatrain
import megatrain.integrations
from megatrain.cli.app import app
from megatrain.config import Config
from megatrain.device.base import Buffers, Work
from megatrain.parallel.distributed import ALONE
from tests.parity.cases import llama, make_batches, make_engine, masters
from tests.race import schedule
from tests.race.schedule import Alike
from tests.race.trace import Clock, TraceDevice
from tests.rules import SWEPT

FILE = Path(__file__).with_name("golden.json")

PLACEMENTS = 40
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen below": {"lowest": 2},
    "experts": {"experts": True},
    "experts, tied": {"experts": True, "tied": True},
}
RANKS = {"1 rank": ALONE, "2 ranks": Alike(1, 2), "2x2 ranks": Alike(1, 4, hosts=2)}
GROUPS = {
    f"{model}, {ranks}": {"tied": False, "lowest": 0} | MODELS[model] | {"ranks": RANKS[ranks]}
    for model in MODELS
    for ranks in RANKS
}
WIDTH = 100  # columns of a help text


class Noting(TraceDevice):
    """Notes each operation with its buffers, and each wait with all that it makes certain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.notes: list[str] = []

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> None:
        names = [[buffer.name for buffer in buffers] for buffers in (reads, writes)]
        self.notes.append(f"{stream}: {name} reads {names[0]} writes {names[1]}")
        super().run(stream, name, work, reads, writes)

    def wait(self, stream: str, event: Clock | None, why: str) -> None:
        if event is not None:
            self.notes.append(f"{stream}: wait for {why}, after {sorted(event.items())}")
        super().wait(stream, event, why)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


@functools.cache
def traced_schedules() -> list[dict[str, Any]]:
    """Evenly taken of those of one rank."""
    every = [each for each in schedule.schedules() if "ranks" not in each]
    return [every[number * len(every) // PLACEMENTS] for number in range(PLACEMENTS)]


def notes(group: str, number: int) -> list[str]:
    """The operations and waits of one placement."""
    with mock.patch.object(schedule, "TraceDevice", Noting):
        device = schedule.trace(**traced_schedules()[number] | GROUPS[group])
    assert isinstance(device, Noting) and not device.races
    return device.notes


def traces(numbers: Sequence[int] = range(PLACEMENTS)) -> dict[str, dict[str, str]]:
    return {
        group: {str(number): digest("\n".join(notes(group, number)).encode()) for number in numbers}
        for group in GROUPS
    }


def weights() -> dict[str, str]:
    """Of losses and weights after five steps of each rule. They depend on the processor."""
    digests = {}
    for rule in SWEPT:
        for precision in ("fp32", "bf16"):
            with make_engine(llama(), rule=rule, precision=precision) as engine:
                losses = [engine.step(batches).loss for batches in make_batches(5)]
                values = b"".join(each.numpy().tobytes() for each in masters(engine).values())
            digests[f"{rule}, {precision}"] = digest(repr(losses).encode() + values)
    return digests


def call(function: Any) -> str:
    """How a function is called, without its types."""
    signature = inspect.signature(function)
    plain = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


def calls(module: Any) -> Iterator[tuple[str, str]]:
    """Calls of all that is public, with the methods of classes."""
    for name in module.__all__:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        if isinstance(value, type) and issubclass(value, Exception):
            yield full, " < ".join(base.__name__ for base in value.__bases__)
            continue
        yield full, call(value) if callable(value) else type(value).__name__
        bases = value.__mro__ if isinstance(value, type) else ()
        own = [vars(base) for base in reversed(bases) if base.__module__.startswith("megatrain")]
        for member, content in {key: each for base in own for key, each in base.items()}.items():
            if member[0] == "_":
                continue
            if isinstance(content, FunctionType | classmethod | staticmethod):
                yield f"{full}.{member}", call(getattr(value, member))
            elif isinstance(content, property):
                yield f"{full}.{member}", "property"


def run_file_keys(section: type[BaseModel] = Config, path: str = "") -> dict[str, str]:
    """The default of each key of a run file."""
    keys = {}
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= run_file_keys(field.annotation, f"{path}{name}.")
        else:
            keys[path + name] = (
                "required" if field.is_required() else json.dumps(default, default=str)
            )
    return keys


def help_texts() -> dict[str, list[str]]:
    group: Any = typer.main.get_command(app)
    texts = {}
    for name, command in {"": group, **group.commands}.items():
        context = command.context_class(command, info_name=name, terminal_width=WIDTH)
        texts[name] = command.get_help(context).splitlines()
    return texts


def checkpoint_keys() -> list[str]:
    """Files of a checkpoint, and keys of its manifest."""
    with TemporaryDirectory() as folder, make_engine(llama(num_hidden_layers=1)) as engine:
        engine.step(make_batches(1)[0])
        engine.save(folder)
        files = [
            str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
        ]
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
    return sorted(files) + sorted(set(keys_of(manifest, "manifest")))


def keys_of(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from keys_of(each, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for each in value:
            yield from keys_of(each, f"{path}[]")
    else:
        yield path


def snapshots() -> dict[str, Any]:
    return {
        "public names": dict(sorted([*calls(megatrain), *calls(megatrain.integrations)])),
        "run file": run_file_keys(),
        "help": help_texts(),
        "checkpoint": checkpoint_keys(),
    }


def stored() -> dict[str, Any]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    rows = {group: enumerate(row.split()) for group, row in content["traces"].items()}
    return content | {"traces": {g: {str(at): each for at, each in row} for g, row in rows.items()}}


def store(content: dict[str, Any]) -> None:
    rows = {group: " ".join(row.values()) for group, row in content["traces"].items()}
    FILE.write_text(json.dumps(content | {"traces": rows}, indent=1) + "\n", encoding="utf-8")


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Each difference on a line, with what it was and what it is."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [
            line
            for name in names
            for line in differences(before.get(name), now.get(name), f"{path}/{name}")
        ]
    if isinstance(before, list) and isinstance(now, list):
        gone = [f"{path}: - {each}" for each in before if each not in now]
        new = [f"{path}: + {each}" for each in now if each not in before]
        return gone + new or [f"{path}: in another order"]
    return [f"{path}: {before!r} is now {now!r}"]
