"""The learning rate of each step of a run, by transformers' schedules."""

import logging
import warnings

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from megatrain.config import Config
from megatrain.errors import InputError

log = logging.getLogger(__name__)

_ROUNDED = 1 + 1e-9  # tolerance: rounding may raise a rate by so much


def make_schedule(
    config: Config,
    optimizer: Optimizer | None,
    total_steps: int,
    done: int,
) -> LRScheduler:
    """The schedule after `done` steps: the learning rate is a function of the step alone.

    Raises InputError: `schedule.options` are not those of this schedule.
    """
    schedule = config.schedule
    try:
        scheduler = get_scheduler(
            schedule.name,
            optimizer,
            num_warmup_steps=schedule.num_warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(schedule.options),
        )
        if 0 < done < total_steps:
            scheduler.last_epoch = done - 1
            with warnings.catch_warnings():  # torch misses the steps before a resume
                warnings.simplefilter("ignore", UserWarning)
                scheduler.step()
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise InputError(f"schedule: {schedule.name} cannot be set up: {error}") from error
    return scheduler


def check_schedule(config: Config, total_steps: int) -> None:
    """Warn of a warm-up that is longer than the run, and of a rate of 0 throughout.

    Raises InputError: the schedule cannot be set up, or some step would have no learning rate.
    """
    warmup, rates = config.schedule.num_warmup_steps(total_steps), set[float]()
    for done in sorted({0, 1, warmup + 1, total_steps // 2, total_steps - 1}):
        if done < total_steps:
            lr = config.optimizer.settings["lr"]
            stand_in = SGD([torch.zeros(1)], lr=lr)
            (rate,) = make_schedule(config, stand_in, total_steps, done).get_last_lr()
            rates.add(float(rate))
            if not 0 <= rate <= lr * _ROUNDED:
                above = f", above optimizer.lr {lr:g}" if rate > lr else ""
                raise InputError(
                    f"schedule: {config.schedule.name} makes the learning rate of step {done + 1} "
                    f"{rate:g}{above}; correct schedule.options (min_lr is a rate, min_lr_rate a "
                    "share of optimizer.lr)"
                )
    if rates == {0.0}:
        log.warning(
            "the learning rate is 0 in every step: nothing is learnt; lower schedule.warmup_steps "
            "(or warmup_ratio), correct schedule.options, or train for more steps"
        )
    elif warmup >= total_steps:
        log.warning(
            "the warm-up takes %d steps, and the run has %d: the learning rate never gets to "
            "optimizer.lr; lower schedule.warmup_steps (or warmup_ratio), or train for more steps",
            warmup,
            total_steps,
        )
