"""The endless sequence of training steps: a pure function of data, seed and position.

The order of rows depends on (seed, epoch) only, and a step takes the next `rows_per_step` of them,
across the end of an epoch if need be. The number of rows taken is therefore the whole state, and
neither workers nor micro-batch sizes change the rows of a step.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatrain.base.shipped import shipped
from megatrain.data.dataset import MicroBatch, PackedDataset, numbered
from megatrain.data.prompts import Prompts
from megatrain.data.row_packing import shuffled
from megatrain.errors import InputError

Step = list[MicroBatch]

# An error names the one cause of changed rows that no user intends.
_DATED = f" (a chat template that writes the date: {shipped('docs/reliability.md')})"


class StepLoader:
    """An endless iterator over steps, each a list of micro-batches.

    Args:
        rows_per_micro_batch: rows that pass a layer together; a step's last micro-batch may have
            fewer. This attribute may be set before the first step is taken.
        workers: steps prepared ahead, each by a thread; 0: a step is prepared when it is taken.
        finish: completes a step in its thread, by adding images for example; None: nothing to add.
    """

    def __init__(
        self,
        dataset: PackedDataset | Prompts,
        *,
        rows_per_step: int,
        rows_per_micro_batch: int,
        seed: int = 0,
        workers: int = 0,
        finish: Callable[[Step], Step] | None = None,
    ) -> None:
        if min(rows_per_step, rows_per_micro_batch) < 1:
            raise InputError("rows_per_step and rows_per_micro_batch must be 1 or more")
        self.dataset = dataset
        self._num_rows = len(dataset)
        self._rows_per_step = rows_per_step
        self.rows_per_micro_batch = rows_per_micro_batch
        self._seed = seed
        self._resumed_at = (0, 0)  # (steps, rows) taken when rows_per_step was last set
        self._steps = 0
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: shuffled(self._num_rows, 1, seed, epoch)
        )
        self._ahead: deque[Future[Step]] = deque()
        self._workers, self._finish = workers, finish
        self._pool = ThreadPoolExecutor(workers, "megatrain-data") if workers else None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._pool is None:
            step = self._make(self._steps)
        else:
            while len(self._ahead) < self._workers:
                self._ahead.append(self._pool.submit(self._make, self._steps + len(self._ahead)))
            step = self._ahead[0].result()  # if interrupted, the next call waits for this step
            self._ahead.popleft()
        self._steps += 1
        return step

    @property
    def epoch(self) -> float:
        """The number of epochs taken so far, with a fraction."""
        return self._first_row(self._steps) / self._num_rows

    def steps_of(self, epochs: float) -> int:
        """The number of steps that take `epochs` epochs; the last one may begin another epoch."""
        # Rounded first, as a product such as 0.1 * 30 may be a little above a whole number.
        return max(1, math.ceil(round(epochs * self._num_rows / self._rows_per_step, 6)))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step taken, and the loader's settings, for JSON."""
        return {
            "steps": self._steps,
            "rows": self._first_row(self._steps),
            "seed": self._seed,
            "fingerprint": self.dataset.fingerprint,
            "rows_per_micro_batch": self.rows_per_micro_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a `state_dict`; workers and batch sizes may differ.

        Raises InputError: the state is of other data or another seed.
        """
        if state["fingerprint"] != self.dataset.fingerprint:
            raise InputError(
                "the data or its settings are not those of the saved run (fingerprint "
                f"{state['fingerprint']!r:.40}, now {self.dataset.fingerprint}): restore them, or "
                f"begin a new run from its weights, with model.path: RUN{_DATED}"
            )
        if state["seed"] != self._seed:
            raise InputError(
                f"the saved run reads its data with seed {state['seed']}, this one with "
                f"{self._seed}: set it back, or start a new run"
            )
        self._drop_ahead()
        self._steps, rows = int(state["steps"]), int(state["rows"])
        self._resumed_at = (self._steps, rows)

    def describe(self) -> str:
        """The places in the data of the rows of the last step taken."""
        rows = [row for micro_batch in self._plan(max(self._steps - 1, 0)) for row in micro_batch]
        places = "; ".join(self.dataset.describe(row) for row in rows[:4])
        return places + (f"; and {len(rows) - 4} more rows" if len(rows) > 4 else "")

    def close(self) -> None:
        """End the threads; afterwards a step is prepared when it is taken."""
        if self._pool is not None:
            self._drop_ahead()
            self._pool.shutdown()
            self._pool = None

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    def _make(self, step: int) -> Step:
        batches: Any = [self.dataset.batch(rows) for rows in self._plan(step)]
        micro_batches = numbered(batches)  # prompts have no pairs
        return micro_batches if self._finish is None else self._finish(micro_batches)

    def _plan(self, step: int) -> list[list[int]]:
        """The rows of each micro-batch of a step."""
        first = self._first_row(step)
        places = range(first, first + self._rows_per_step)
        positions = (divmod(place, self._num_rows) for place in places)
        rows = [int(self._order(epoch)[position]) for epoch, position in positions]
        if not self.dataset.packing:
            # Sorted by length, rows need less padding; the step's mean loss is the same.
            rows.sort(key=lambda row: -self.dataset.row_lengths[row])
        size = self.rows_per_micro_batch
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def _first_row(self, step: int) -> int:
        steps, rows = self._resumed_at
        return rows + (step - steps) * self._rows_per_step
