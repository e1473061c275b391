"""TensorBoard, Trackio, Weights & Biases and MLflow, through accelerate's classes of them."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import read_json
from megatrain.config import Config
from megatrain.errors import InputError, first_line
from megatrain.run_folder.layout import TRACKING

_IDS = "runs.json"  # by tracker, what a resumed run is found by
_SHOWN_AS = {"lr": "learning_rate"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Run:
    """What a tracker is told of a run.

    Attributes:
        folder: where its files go.
        first: the step that the run goes on after.
        id: what the tracker called the run before; None: it begins.
    """

    project: str
    name: str
    folder: Path
    first: int
    online: bool
    id: str | None


def _tensorboard(run: _Run) -> dict[str, Any]:
    # What an earlier process has logged of the steps to come is not shown.
    purge = {"purge_step": run.first + 1} if run.first else {}
    return {"run_name": "tensorboard", "logging_dir": str(run.folder), **purge}


def _trackio(run: _Run) -> dict[str, Any]:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        if name in os.environ and not run.online:
            raise InputError(f"{name} sends metrics away; unset it, or set tracking.online: true")
    resume = "allow" if run.first else "never"
    return {"run_name": run.project, "name": run.name, "resume": resume}


def _wandb(run: _Run) -> dict[str, Any]:
    mode = {} if run.online else {"mode": "offline"}
    named = {"name": run.name, "id": run.id, "resume": "allow"}
    return {"run_name": run.project, "dir": str(run.folder), **named, **mode}


def _mlflow(run: _Run) -> dict[str, Any]:
    import mlflow

    if not run.online:
        mlflow.set_tracking_uri(f"sqlite:///{(run.folder / 'mlflow.db').absolute()}")
    artifacts = None if run.online else str((run.folder / "mlflow").absolute())
    return {
        "experiment_name": run.project,
        "run_name": run.name,
        "run_id": run.id,
        "logging_dir": artifacts,
    }


@dataclass(frozen=True)
class _Kind:
    """One tracker: its class in accelerate, its arguments there, and what it calls a run."""

    cls: str
    arguments: Callable[[_Run], dict[str, Any]]
    id_of: Callable[[Any], str | None] = lambda started: None


_KINDS = {
    "tensorboard": _Kind("TensorBoardTracker", _tensorboard),
    "trackio": _Kind("TrackioTracker", _trackio),
    "wandb": _Kind("WandBTracker", _wandb, lambda started: started.id),
    "mlflow": _Kind("MLflowTracker", _mlflow, lambda started: started.info.run_id),
}


def check_trackers(config: Config) -> None:
    """Raises InputError: a tracker of the run is not installed."""
    for name in config.tracking.trackers:
        if find_spec(name) is None:
            raise InputError(
                f'tracking.to: {name} is not installed; pip install "megatrain[{name}]"'
            )


class Trackers:
    """The trackers of a run, started; each gets what `metrics.jsonl` gets.

    One that fails later costs a warning and is left alone from then on; the run goes on.
    """

    def __init__(self, config: Config, run: Path, first: int) -> None:
        """Start them; `first`: the step that the run goes on after.

        Raises:
            InputError: one cannot start.
        """
        self._running: dict[str, Any] = {}
        settings, folder = config.tracking, run / TRACKING
        if not settings.trackers:
            return
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        ids = read_json(folder / _IDS) if (folder / _IDS).is_file() else {}
        for name in settings.trackers:
            title = settings.run_name or run.resolve().name
            known = ids.get(name) if first else None
            of = _Run(settings.project, title, folder, first, settings.online, known)
            try:
                self._running[name] = _started(name, of, settings.options.get(name, {}))
                ids[name] = _KINDS[name].id_of(self._running[name].tracker)
                if not first:
                    self._running[name].store_init_configuration(_flat(config))
            except Exception as error:  # whatever the library raises
                self.close()
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                told = f"tracking.to: {name} does not start: {first_line(error)}"
                raise InputError(told) from error
        (folder / _IDS).write_text(json.dumps(ids) + "\n", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass a line of `metrics.jsonl` on; what is no number stays there."""
        shown = {
            _name(key): value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float)
        }
        for name, tracker in [*self._running.items()] if shown else ():
            self._do(name, partial(tracker.log, shown, step=record["step"]))

    def close(self) -> None:
        """Let each finish what it is writing."""
        for name, tracker in [*self._running.items()]:
            self._do(name, tracker.finish)
        self._running.clear()

    def _do(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # whatever the library raises
            del self._running[name]
            log.warning("%s: %s; it gets no more, the run goes on", name, first_line(error))


def _started(name: str, run: _Run, options: Mapping[str, Any]) -> Any:
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's logging asks for it
    kind = _KINDS[name]
    tracker = getattr(tracking, kind.cls)(**kind.arguments(run) | dict(options))
    tracker.start()
    return tracker


def _name(key: str) -> str:
    """`eval_loss` is `eval/loss` there, `loss` is `train/loss`."""
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    return f"train/{_SHOWN_AS.get(key, key)}"


def _flat(config: Config) -> dict[str, Any]:
    """The run file as `section.key: value`, what is no plain value as text."""
    plain = bool | int | float | str
    return {
        f"{section}.{key}": value if isinstance(value, plain) else str(value)
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if value is not None
    }
