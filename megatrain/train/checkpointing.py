"""A run's checkpoints: when they are made, and which of them are kept."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.base.whole_files import flush
from megatrain.checkpoint import Saving, rotate
from megatrain.errors import InputError, MegatrainError, RunFailed, StepRefused
from megatrain.run_folder.layout import CHECKPOINTS, METRICS, checkpoint_folder, checkpoints
from megatrain.train.resume import RunState

if TYPE_CHECKING:
    from megatrain.train.setup import Job

_RETRY_AFTER = 10  # steps, when a checkpoint could not be written

log = logging.getLogger(__name__)


@dataclass
class Checkpointing:
    """Saves the run's state while training goes on, until the next save is due.

    A checkpoint that cannot be written costs a warning, not the run: the one before it is whole,
    and the next attempt follows soon.
    """

    job: "Job"
    saved: int  # the step of the newest whole checkpoint, 0 if there is none
    best: Callable[[], int | None]  # the step of the best saved state; its checkpoint is kept
    _running: tuple[int, Saving] | None = None
    _retry: int | None = None  # the step after which a failed save is tried again
    _stays: bool = False  # the next checkpoint is never deleted

    def after(self, state: RunState, *, asked: bool, last: bool) -> None:
        """After a step, start a checkpoint if one is due, once the one before it is written."""
        every, step = self.job.config.checkpoint.every, state.step
        due = self.job.config.checkpoint.at_end if last else every is not None and step % every == 0
        tried_again = self._retry is not None and step >= self._retry
        begun = self.saved if self._running is None else self._running[0]
        wanted = (due or asked or tried_again) and step != begun
        self._settle(wait=wanted or last)
        if wanted:
            self._stays |= due and self._is_marked(step)
            self._begin(state)

    def keep_best(self, state: RunState) -> None:
        """Save the state, the best so far, unless its checkpoint is written or begun."""
        if self._running is not None and self._running[0] != state.step:
            self._settle(wait=True)
        if self._running is None and self.saved != state.step:
            self._begin(state)

    def now(self, state: RunState) -> None:
        """Save this state and wait for it. Raises RunFailed: it cannot be written."""
        self._settle(wait=True)
        if self.saved == state.step:
            return
        try:
            self._save(state).wait()
        except (InputError, OSError) as error:
            raise RunFailed(
                f"{self.job.folder}: step {state.step} cannot be saved: {error}"
            ) from error
        self._is_whole(state.step)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        self._settle(wait=True)

    @contextmanager
    def rescue(self, state: Callable[[], RunState]) -> Iterator[None]:
        """When the block fails, save the state if it is whole, then raise the error."""
        try:
            yield
        except Exception as error:
            if self.job.ranks.size == 1 or _is_of_all(error):  # ranks, which save together
                self._rescue(state())
            raise

    def _rescue(self, state: RunState) -> None:
        try:
            self.now(state)
            if state.step:
                log.info("the state after step %d is saved; --resume goes on there", state.step)
        except Exception as error:
            older = f"; --resume goes on after step {self.saved}" if self.saved else ""
            log.warning("the state before the failure is not saved: %s%s", error, older)

    def _begin(self, state: RunState) -> None:
        self._retry = None
        try:
            self._running = state.step, self._save(state)
        except (MegatrainError, OSError) as error:
            self._failed(state.step, error)

    def _save(self, state: RunState) -> Saving:
        with suppress(OSError):  # the log of these steps must not be lost where they are not
            flush(self.job.folder / METRICS)
        return self.job.engine.save(
            checkpoint_folder(self.job.folder, state.step),
            extra=dict(vars(state)),
            attach=self.job.write_tokenizer,
            keep=self._stays or self._is_marked(state.step),
            wait=False,
        )

    def _is_marked(self, step: int) -> bool:
        every = self.job.config.checkpoint.keep_every
        return every is not None and step % every == 0

    def _settle(self, *, wait: bool) -> None:
        if self._running is None:
            return
        if not wait and not all(self.job.ranks.all_gather_object(self._running[1].done)):
            return
        (step, saving), self._running = self._running, None
        try:
            saving.wait()
        except MegatrainError as error:
            self._failed(step, error)
            return
        self._stays = False
        self._is_whole(step)

    def _is_whole(self, step: int) -> None:
        self.saved, keep = step, self.job.config.checkpoint.keep
        if not self.job.ranks.rank and len(checkpoints(self.job.folder)) > keep:
            try:
                newest, best = checkpoint_folder(self.job.folder, step), self.best()
                spared = [] if best is None else [checkpoint_folder(self.job.folder, best)]
                rotate(self.job.folder / CHECKPOINTS, keep, newest=newest, spared=spared)
            except OSError as error:
                log.warning("an old checkpoint cannot be deleted: %s", error)

    def _failed(self, step: int, error: Exception) -> None:
        again = self._retry = step + _RETRY_AFTER
        then = f" and tries again after step {again}" if again <= self.job.total_steps else ""
        log.warning("%s; the run goes on%s", error, then)


def _is_of_all(error: BaseException | None) -> bool:
    if not isinstance(error, MegatrainError):
        return False
    return error.by_all or isinstance(error, StepRefused) or _is_of_all(error.__cause__)
