"""What is foretold of a large head, against the engine's own."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Engine, Placement
from megatrain.forecast import op_counter
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.loss import CROSS_ENTROPY, DPO, JointLoss
from tests.parity.cases import Noting
from tests.sweeps import few
from tests.unit.forecast_cases import small_machine, wide_config, wide_spec
from tests.unit.test_forecast_long_rows import tallied

ROWS, TOKENS = 6, 32


@dataclass(frozen=True)
class Together(JointLoss):
    """Cross entropy, found in two visits of the head."""

    def joint(self, log_prob_N, targets_N, *given):
        return -log_prob_N.sum()


class Keeping(Noting):
    """Knows the memory of all buffers, so that a counter may leave it out."""

    def __init__(self):
        super().__init__()
        self.kept: list[Tensor] = []

    def empty(self, name, numel, dtype):
        self.kept.append((buffer := super().empty(name, numel, dtype)).data)
        return buffer

    def host(self, name, numel, dtype, *, pinned):
        self.kept.append((buffer := super().host(name, numel, dtype, pinned=pinned)).data)
        return buffer


def drawn(tokens, micro, rows=ROWS):
    ids = torch.randint(8192, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part, "labels": part} for part in ids.split(micro)]


def head_seconds(found):
    spans = (span for span in found.spans if span.stream == "compute")
    return sum(span.seconds for span in spans if span.name.startswith("head"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_of_all_tokens_computes_logits_once_more(compiled):
    machine, forecasts = replace(small_machine(), device_gbps=1e9), ForecastCache(wide_spec())
    workload = Workload(ROWS * TOKENS, TOKENS, None, True, "bf16", compiled)
    placement = Placement(slots=3, compile=compiled)
    one, two = (
        head_seconds(forecasts.of(machine, placement, replace(workload, loss=loss), 4))
        for loss in (CROSS_ENTROPY, DPO())
    )
    product = 2 * ROWS * TOKENS * 256 * 8192 / (machine.matmul_tflops * 1e12)
    assert two - one == pytest.approx(product, rel=0.01)


def test_a_loss_of_all_tokens_is_foretold_in_one_pass_without_graphs():
    """As the engine takes it, whatever the placement says."""
    workload = Workload(ROWS * TOKENS, TOKENS, None, True, "bf16", True, loss=DPO())
    kept = Placement(slots=3, passes=3, save_activations=2, compile=True)
    found, plain = (
        ForecastCache(wide_spec()).of(small_machine(), each, workload, 2)
        for each in (kept, replace(kept, passes=1, save_activations=0))
    )
    assert found.bounds == pytest.approx(plain.bounds)
    assert found.device_bytes["gradient sums"] > 0 and "kept graphs" not in found.device_bytes


@pytest.mark.parametrize(
    ("tokens", "boundaries", "loss"),
    few(
        [
            (4 * TOKENS, "device", Together()),
            (4 * TOKENS, "host", CROSS_ENTROPY),
            (TOKENS, "device", CROSS_ENTROPY),
            (4 * TOKENS, "device", CROSS_ENTROPY),
        ],
        1,
    ),
)
def test_what_a_step_works_with_is_foretold(tokens, boundaries, loss):
    """All device memory at the peak of a real step, but for its long-lived buffers."""
    placement = Placement(layer_inputs=boundaries, head_tokens=100)
    workload = Workload(4 * tokens, tokens, 2, True, "fp32", False, loss=loss)
    found = ForecastCache(wide_spec()).of(small_machine(), placement, workload, 2)
    told = sum(found.device_bytes.get(p, 0) for p in ("activations", "working set"))
    told += found.device_bytes["layer arguments"]
    options = {"optimizer": AdamW(), "precision": "fp32", "placement": placement}
    step, device = drawn(tokens, 2, rows=4), Keeping()
    with Engine(wide_config(), device=device, **options) as engine:
        engine.step(step, loss)
        with tallied(), op_counter.OpCounter() as counts:
            counts.ignore(device.kept)
            engine.step(step, loss)
    assert counts.peak_bytes == pytest.approx(told, rel=0.03)
