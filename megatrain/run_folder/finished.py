"""Of what length the run is that has ended."""

import json
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import parse_json
from megatrain.base.whole_files import write_file
from megatrain.config import Config
from megatrain.run_folder.layout import FINISHED, MODEL

_MOST_BYTES = 1 << 16


def note_finished(
    run: Path, config: Config, steps: int, *, best: Any = None, early: str | None = None
) -> None:
    """Write of what length the run is that `model/` is of.

    Args:
        best: which state `model/` is of, where the best one was asked for.
        early: why the run has ended before its last step.
    """
    more = {"best": best, "early": early}
    noted = {"done": steps, **{name: value for name, value in more.items() if value is not None}}
    write_file(run / FINISHED, json.dumps(_length(config) | noted) + "\n")


def finished_steps(run: Path, config: Config) -> int | None:
    """How many steps a run has done that is as long as it is to be; None: it goes on.

    The model alone says nothing: a run that was made longer still has that of the shorter one, and
    one that is to have its best state may have its last.
    """
    noted = _noted(run)
    done, best, _ = (noted.pop(name, None) for name in ("done", "best", "early"))
    wanted = config.watched if config.checkpoint.load_best else None
    names = best if isinstance(best, dict) else ()
    has = next((name for name in names if name != "step"), None)
    return done if noted == _length(config) and has == wanted else None


def early_end(run: Path) -> str | None:
    """Why the run of `model/` ended before its last step; None: it did not."""
    why = _noted(run).get("early")
    return why if isinstance(why, str) else None


def model_steps(run: Path) -> int | None:
    """After how many steps `model/` was written; None: there is none, or nobody knows."""
    return _noted(run).get("done")


def model_state(run: Path) -> int | None:
    """The step of the state that `model/` holds, the best or the last; None: nobody knows."""
    noted = _noted(run)
    best = noted.get("best")
    step = best.get("step") if isinstance(best, dict) else None
    return step if type(step) is int else noted.get("done")


def _noted(run: Path) -> dict[str, Any]:
    """Empty where nothing is noted, or no number of steps `done`."""
    path = run / FINISHED
    if not (run / MODEL).is_dir() or not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            noted = parse_json(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) and type(noted.get("done")) is int else {}


def _length(config: Config) -> dict[str, Any]:
    length: dict[str, Any] = {"steps": config.training.steps, "epochs": config.training.epochs}
    if (rule := config.training.early_stopping) is not None:
        length["early_stopping"] = rule.model_dump()
    return length
