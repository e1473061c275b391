"""Compiled layers, by torch's own compiler for the CPU, train as eager ones but for rounding."""

import shutil

import pytest
import torch

from megatrain import AdamW, Engine, Placement
from tests.parity.cases import llama, make_batches

# By choice: computed again in the backward's graph, graphs kept by half and whole, and inputs back
# from the host.
CHOICES: tuple[dict, ...] = (
    {},
    {"save_activations": 1},
    {"save_activations": 2, "save_all": 1, "passes": 2},
    {"layer_inputs": "host"},
    {"offload_activations": 1},
)


def trained(**choices):
    placement = Placement(slots=2, **choices)
    with Engine(
        llama(), optimizer=AdamW(lr=1e-3), max_grad_norm=0.5, precision="fp32", placement=placement
    ) as engine:
        results = [engine.step(batch) for batch in make_batches(3)]
        engine.flush()
        masters = {name: master.clone() for name, master in engine.named_masters()}
    return [r.loss for r in results], [r.grad_norm for r in results], masters


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_layers_train_as_eager_ones():
    losses, norms, masters = trained()
    for choices in CHOICES:
        torch.compiler.reset()
        other = trained(compile=True, **choices)
        assert other[0] == pytest.approx(losses, rel=1e-6)
        assert other[1] == pytest.approx(norms, rel=1e-5)
        for name, master in masters.items():
            assert torch.allclose(other[2][name], master, rtol=0, atol=2e-5), (name, choices)
