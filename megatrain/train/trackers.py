"""TensorBoard, Trackio, Weights & Biases and MLflow, through accelerate's trackers."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import read_json
from megatrain.config import Config
from megatrain.errors import InputError, in_one_line
from megatrain.run_folder.layout import TRACKING

_IDS = "runs.json"  # the run's id in each tracker, which a resumed run goes on with
_ID_OF = {"wandb": attrgetter("id"), "mlflow": attrgetter("info.run_id")}
_SHOWN_AS = {"lr": "learning_rate"}

log = logging.getLogger(__name__)


def check_trackers(config: Config) -> None:
    """Raise InputError if a tracker of the run is not installed."""
    for name in config.tracking.trackers:
        if find_spec(name) is None:
            raise InputError(f'tracking.to: {name} is missing; pip install "megatrain[{name}]"')


class Trackers:
    """The trackers of a run; each gets the records of `metrics.jsonl`.

    A tracker that fails later causes a warning, and gets no more records; the run goes on.
    """

    def __init__(self, config: Config, run: Path, done: int) -> None:
        """Start the trackers; `done`: the number of steps that the run has taken already."""
        self._running: dict[str, Any] = {}
        folder = run / TRACKING
        if not config.tracking.trackers:
            return
        from accelerate import PartialState, tracking

        PartialState()  # accelerate's logging asks for it
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        ids = read_json(folder / _IDS) if (folder / _IDS).is_file() else {}
        for name in config.tracking.trackers:
            try:
                options = _options(name, config, run, done, ids.get(name) if done else None)
                tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**options)
                tracker.start()
                self._running[name] = tracker
                ids[name] = _ID_OF[name](tracker.tracker) if name in _ID_OF else None
                if not done:
                    tracker.store_init_configuration(_flat(config))
            except Exception as error:  # whatever the library raises
                self.close()
                if is_new:
                    shutil.rmtree(folder, ignore_errors=True)
                message = f"tracking.to: {name} does not start: {in_one_line(error, 200)}"
                raise InputError(message) from error
        (folder / _IDS).write_text(json.dumps(ids) + "\n", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass the numbers of a record of `metrics.jsonl` on."""
        numbers = {}
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                is_evaluated = key.startswith("eval_")
                name = f"eval/{key[5:]}" if is_evaluated else f"train/{_SHOWN_AS.get(key, key)}"
                numbers[name] = value
        for name, tracker in [*self._running.items()] if numbers else ():
            self._try(name, partial(tracker.log, numbers, step=record["step"]))

    def close(self) -> None:
        for name, tracker in [*self._running.items()]:
            self._try(name, tracker.finish)
        self._running.clear()

    def _try(self, name: str, work: Callable[[], Any]) -> None:
        """Call a tracker; if it fails, warn and drop it."""
        try:
            work()
        except Exception as error:  # whatever the library raises
            del self._running[name]
            log.warning("%s: %s; it gets no more, the run goes on", name, in_one_line(error, 200))


def _options(name: str, config: Config, run: Path, done: int, run_id: Any) -> dict[str, Any]:
    """Arguments of accelerate's tracker `name`; `run_id`: a resumed run's id in the tracker."""
    settings, folder = config.tracking, run / TRACKING
    title = settings.run_name or run.resolve().name
    options: dict[str, Any] = {"run_name": settings.project, "name": title}
    if name == "tensorboard":
        options = {"run_name": "tensorboard", "logging_dir": str(folder)}
        if done:  # hides records of later steps that an earlier process has logged
            options["purge_step"] = done + 1
    elif name == "trackio":
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if variable in os.environ and not settings.online:
                raise InputError(f"{variable} sends metrics away; unset it, or set tracking.online")
        options["resume"] = "allow" if done else "never"
    elif name == "wandb":
        options |= {"dir": str(folder), "id": run_id, "resume": "allow"}
        options |= {} if settings.online else {"mode": "offline"}
    else:
        import mlflow

        options = {"experiment_name": settings.project, "run_name": title, "run_id": run_id}
        if not settings.online:
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
            options["logging_dir"] = str((folder / "mlflow").absolute())
    return options | settings.options.get(name, {})  # type: ignore[call-overload]


def _flat(config: Config) -> dict[str, Any]:
    """The run file as `section.key: value`; lists and mappings become text."""
    plain = bool | int | float | str
    return {
        f"{section}.{key}": value if isinstance(value, plain) else str(value)
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if value is not None
    }
