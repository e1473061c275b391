"""What a step will take before it is run: seconds by stream, device and host memory by part.

The one cost model, of `placement="auto"` (engine/fit.py) and of `megatrain plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.machine import Machine
from megatrain.model.outline import Outline
from megatrain.placement import Placement
from megatrain.telemetry.timeline import Breakdown, Span


@dataclass(frozen=True)
class Forecast:
    """One steady optimizer step, as it will be on a machine.

    Attributes:
        seconds: from one step's end to the next one's, while the updates of the first run.
        model_tflops: `6 x parameters x tokens / seconds`, in 1e12.
        spans: what each stream does when, from the step's begin (telemetry/timeline.py).
        breakdown: the same, summed up.
        bounds: seconds that each resource is busy; no schedule can be faster than the largest.
        binds: the name of the largest.
        device_bytes: at the step's peak, by part: `context`, `weights slots`, `gradient rooms`,
            `embedding rows`, `resident tiles`, `boundaries`, `kept graphs`, `working set`,
            `allocator`, ...
        host_bytes: as `Engine.memory()` names them (`host_weights_bytes`, ...), and
            `host_process_bytes` for the process itself.
    """

    placement: Placement
    machine: Machine
    parameters: int
    tokens_per_step: int
    sequence_length: int
    micro_batch: int
    seconds: float
    spans: Sequence[Span]
    breakdown: Breakdown
    bounds: dict[str, float]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def model_tflops(self) -> float:
        return 6 * self.parameters * self.tokens_per_step / self.seconds / 1e12

    @property
    def binds(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def device_peak_bytes(self) -> int:
        """What the driver shows as taken by the process at most, the context included."""
        return sum(self.device_bytes.values())

    @property
    def host_peak_bytes(self) -> int:
        """Resident memory of the whole process at most."""
        return sum(self.host_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`; without the spans."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops": self.model_tflops,
            "binds": self.binds,
            "bounds": self.bounds,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "micro_batch": self.micro_batch,
            "placement": self.placement.as_dict(),
            "machine": self.machine.as_dict(),
            "parameters": self.parameters,
            "breakdown": self.breakdown.as_dict(),
            "device_bytes": self.device_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "host_bytes": self.host_bytes,
            "host_peak_bytes": self.host_peak_bytes,
        }


def forecast(
    outline: Outline,
    machine: Machine,
    placement: Placement,
    *,
    tokens_per_step: int,
    sequence_length: int,
    micro_batch: int,
    clip: bool = True,
    precision: Literal["bf16", "fp32"] = "bf16",
) -> Forecast:
    """One steady step of a model, with nothing allocated.

    Args:
        outline: of the model on the meta device (`probe.outline(open_source(config).model)`).
        tokens_per_step: rounded down to whole rows of `sequence_length`, at least one.
        micro_batch: rows.
        clip: with exact clipping updates wait for the global norm.
    """
    raise NotImplementedError
