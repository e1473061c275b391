"""Resumes a run: finds its checkpoint, checks which settings have changed, and cuts its log."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint import open_checkpoint
from megatrain.config import Config
from megatrain.config.section import shown
from megatrain.errors import InputError, explained
from megatrain.run_folder.layout import checkpoint_folder, checkpoints, require_plain
from megatrain.telemetry.metrics import lines

# Settings that a resumed run may change: it still trains the same model on the same rows. Paths of
# data and tokenizer may change, because the loader's position has a fingerprint of the rows.
_FREE_SECTIONS = ("loss", "rollout", "schedule", "checkpoint", "output", "tracking")
FREE_KEYS = {
    "model": (
        "tokenizer", "chat_template", "eos_token", "trust_remote_code", "attn_implementation",
    ),
    "data": ("path", "eval_path", "cache_dir", "hub_config", "hub_split"),
    "training": (
        "steps", "epochs", "micro_batch_size", "max_grad_norm", "eval_every",
        "early_stopping", "on_nonfinite", "max_skips", "spike", "recheck",
    ),
    "optimizer": ("lr", "betas", "eps"),
    "engine": (
        "device", "devices", "placement", "device_memory", "host_memory", "disk", "disk_space",
        "sequence_parallel", "verify",
    ),
}  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """The state of a run that a checkpoint keeps beside the engine's; all of it is JSON.

    `step` counts skipped steps, too. `data`: the loader's position. `refusals`: the state of
    `BadSteps`. `config`: the resolved run file. `rollouts`: replies that later steps learn from.
    """

    step: int
    data: Mapping[str, Any]
    refusals: Mapping[str, Any]
    config: Mapping[str, Any]
    rollouts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, extra: Mapping[str, Any], where: Path) -> "RunState":
        """The state in the `extra` values of a run's checkpoint `where`.

        Raises InputError: no run has written them, or a run of an earlier version with callbacks.
        """
        step, rollouts = extra.get("step"), extra.get("rollouts", {})
        parts = [extra.get("data"), extra.get("refusals"), extra.get("config"), rollouts]
        if type(step) is not int or step < 0 or not all(isinstance(p, dict) for p in parts):
            raise InputError(f"{where}: not a checkpoint of a training run; choose another")
        if extra.get("callbacks"):
            raise InputError(
                f"{where}: its run had callbacks, which a run no longer calls; begin a new run "
                f"from its weights, with model.path: {where}"
            )
        return cls(step, *parts)


@dataclass(frozen=True)
class Start:
    """A checkpoint that a run goes on from."""

    checkpoint: Path
    state: RunState

    @property
    def run(self) -> Path:
        return self.checkpoint.absolute().parent.parent


class Damaged(InputError):
    """A checkpoint is damaged, which only shows when all of it is read."""


def check_config(config: Config, before: Mapping[str, Any], where: Path) -> None:
    """Raise InputError if a setting differs that a resumed run may not change.

    Args: `before`: the resolved configuration of `where`.
    """
    for section, key, old, new in differences(before, config):
        name = f"{section}.{key}"
        may_change = section in _FREE_SECTIONS or key in FREE_KEYS.get(section, ())
        may_change &= name not in ("loss.name", "loss.labels", "loss.pooling")  # decide the head
        if name == "loss.beta" and config.loss.kind == "prompts":
            may_change &= bool(old)  # a run with beta 0 has recorded no reference
        if not may_change:
            raise InputError(
                f"{name}: {shown(new)} now, but {where} was made with {shown(old)}, and this "
                "cannot change on resume; set it back, or start a new run"
            )


def say_differences(config: Config, state: RunState) -> None:
    """Log the settings that differ from those of the checkpoint."""
    for section, key, old, new in differences(state.config, config):
        if section not in ("output", "checkpoint", "tracking"):
            log.info("resume: %s.%s was %s, is %s now", section, key, shown(old), shown(new))


def differences(before: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield section, key, old and new value of settings that differ, if `before` has the key."""
    for section, keys in config.model_dump(mode="json").items():
        saved = before.get(section)
        for key, value in keys.items():
            if isinstance(saved, dict) and key in saved and saved[key] != value:
                yield section, key, saved[key], value


def cut_metrics(path: Path, step: int) -> list[Mapping[str, Any]]:
    """Delete the lines after `step`, and a line cut short, from a metrics file; return the rest.

    This is one `truncate`, which needs no disk space; a kill leaves the old or the new file.

    Raises InputError: the file cannot be read or written.
    """
    require_plain(path)
    records: list[Mapping[str, Any]] = []
    num_read = num_kept = 0  # bytes
    with explained(f"{path}: cannot be continued", of=OSError), path.open("a+b") as file:
        file.seek(0)
        for line, record in lines(file):
            num_read += len(line)
            number = None if record is None else record.get("step")
            if isinstance(number, int) and number > step:
                break
            if not line.endswith(b"\n"):
                continue  # the last line was cut short
            if record is not None and isinstance(number, int):
                records.append(record)
            num_kept = num_read
        file.truncate(num_kept)
        os.fsync(file.fileno())
    return records


def find_starts(run: Path, config: Config) -> Iterator[Start]:
    """Yield checkpoints that the run can go on from, newest first; the log names damaged ones.

    Raises InputError: a checkpoint cannot be used with this configuration.
    """
    for step in reversed(checkpoints(run)):
        folder = checkpoint_folder(run, step)
        try:
            checkpoint = open_checkpoint(folder)
        except InputError as error:
            log.warning("not resumed from: %s", error)
            continue
        state = RunState.of(checkpoint.extra, folder)
        if state.step != step:  # the order of checkpoints follows their names
            log.warning("not resumed from: %s: holds step %d; was it renamed?", folder, state.step)
            continue
        check_config(config, state.config, folder)
        yield Start(folder, state)
