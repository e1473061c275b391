"""The learning rate of each step of a run: what transformers' schedules make of it."""

import logging
import math
import warnings

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from megatrain.config import Config
from megatrain.errors import InputError

log = logging.getLogger(__name__)

_ROUNDED = 1 + 1e-9  # how far above itself a rate may come out


def make_schedule(
    config: Config, optimizer: Optimizer | None, total_steps: int, done: int
) -> LRScheduler:
    """The schedule after `done` steps: the learning rate is a function of the step alone.

    Raises:
        InputError: `schedule.options` are not those of this schedule.
    """
    schedule = config.schedule
    try:
        made = get_scheduler(
            schedule.name,
            optimizer,
            num_warmup_steps=schedule.num_warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(schedule.options),
        )
        if 0 < done < total_steps:
            made.last_epoch = done - 1
            with warnings.catch_warnings():  # torch misses the optimizer's steps, taken long ago
                warnings.simplefilter("ignore", UserWarning)
                made.step()
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise InputError(f"schedule: {schedule.name} cannot be set up: {error}") from error
    return made


def check_schedule(config: Config, total_steps: int) -> None:
    """Warn of a warm-up that is longer than the run.

    Raises:
        InputError: the schedule cannot be set up, or some step would have no learning rate.
    """
    warmup = config.schedule.num_warmup_steps(total_steps)
    for done in sorted({0, 1, warmup + 1, total_steps // 2, total_steps - 1}):
        if done < total_steps:
            lr = config.optimizer.settings["lr"]
            stand_in = SGD([torch.zeros(1)], lr=lr)
            (rate,) = make_schedule(config, stand_in, total_steps, done).get_last_lr()
            if not 0 <= rate < math.inf:
                raise InputError(
                    f"schedule: {config.schedule.name} makes the learning rate of step {done + 1} "
                    f"{rate}; correct schedule.options"
                )
            if rate > lr * _ROUNDED:
                raise InputError(
                    f"schedule: {config.schedule.name} makes the learning rate of step {done + 1} "
                    f"{rate:g}, above optimizer.lr {lr:g}; correct schedule.options (min_lr is a "
                    "rate, min_lr_rate a share of optimizer.lr)"
                )
    if warmup >= total_steps:
        log.warning(
            "the warm-up takes %d steps, and the run has %d: the learning rate never gets to "
            "optimizer.lr; lower schedule.warmup_steps (or warmup_ratio), or train for more steps",
            warmup,
            total_steps,
        )
