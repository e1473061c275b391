"""Rates and memory of a step."""

from typing import Any

from megatrain.api import Engine
from megatrain.telemetry.gpu import bf16_peak_tflops, find_gpu
from megatrain.telemetry.memory import process_bytes


class Meter:
    """Rates and memory of a step. Model TFLOPS = 6 x parameters x tokens / seconds.

    Tokens are positions computed, padding included.
    """

    def __init__(self, engine: Engine, precision: str) -> None:
        self._engine = engine
        gpu = find_gpu(str(engine.device.torch_device))
        counts = gpu is not None and precision == "bf16"
        self._peak_tflops = bf16_peak_tflops(gpu.name) if gpu and counts else None

    def measure(self, tokens: int, seconds: float) -> dict[str, Any]:
        """What `metrics.jsonl` says of a step besides its loss."""
        tflops = 6 * self._engine.num_parameters * tokens / seconds / 1e12
        return {
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 3),
            "model_tflops": round(tflops, 6),
            "mfu": round(tflops / self._peak_tflops, 4) if self._peak_tflops else None,
            "device_peak_bytes": self._engine.memory()["device_peak_bytes"],
            "host_bytes": process_bytes(),
        }
