"""Checksums of tiles that rest on a real GPU, and of those that rest on its host."""

import pytest
import torch

from megatrain import Placement, RunFailed
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("resident", [(), ("layer 1", "head")])
def test_bits_are_compared_and_nothing_changes(rule, resident):
    steps, results = make_batches(4), []
    options: dict = {"rule": rule, "precision": "bf16", "device": "cuda"}
    options["placement"] = Placement(slots=2, resident=resident)
    for verify in ("step", "off"):
        with make_engine(llama(), verify=verify, **options) as engine:
            for step in steps:
                engine.step(step)
            results.append(masters(engine))
    assert same(*results)
    for plane in range(4 if rule == "adamw" else 5):
        with make_engine(llama(), verify="step", **options) as engine:
            engine.step(steps[0])
            engine.flush()
            torch.cuda.synchronize()
            [tile] = [tile for tile in store_of(engine).tiles if tile.name == "layer 1"]
            buffer = [*tile.planes.values()][plane]
            if len(buffer.data):
                buffer.data.view(torch.uint8)[4] ^= 8
                torch.cuda.synchronize()
                with pytest.raises(RunFailed, match="layer 1: the plane of .*one flipped bit"):
                    for step in steps[1:]:
                        engine.step(step)
