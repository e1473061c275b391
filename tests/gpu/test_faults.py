"""On a real GPU: engines that end or fail in other ways than planned, and what is easily lost."""

import gc

import pytest
import torch

from megatrain import Placement, RunFailed
from tests.inside import program_of
from tests.parity.cases import (
    llama,
    make_batches,
    make_engine,
    masters,
    parameters,
    relative_error,
    same,
)

pytestmark = pytest.mark.gpu


def engine_of(model, **options):
    """Streamed and updated by host threads; on its own a tiny model would rest on the GPU."""
    options.setdefault("placement", Placement(slots=3))
    return make_engine(model, device="cuda", **options)


def test_engines_that_nobody_closes_leave_no_pinned_memory(caplog):
    """Else a later engine cannot pin memory that happens to lie at the same address."""
    [step] = make_batches(1)
    for _ in range(20):
        engine = engine_of(llama(), precision="bf16")
        engine.step(step)
        del engine
        gc.collect()
    assert "cannot be pinned" not in caplog.text


class Refusing:
    """CUDA's runtime, which registers nothing (really), or nothing larger than a page (so said)."""

    def __init__(self, runtime, least_bytes, *, really):
        self._runtime, self._least, self._really = runtime, least_bytes, really

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def cudaHostRegister(self, address, num_bytes, flags):
        if num_bytes < self._least:
            return int(self._runtime.cudaHostRegister(address, num_bytes, flags))
        # No memory is at address 0: a true refusal, which leaves its error behind.
        return int(self._runtime.cudaHostRegister(0, num_bytes, flags)) if self._really else 2


@pytest.mark.parametrize("least_bytes", [0, 4096])
@pytest.mark.parametrize("really", [False, True])
@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_without_pinning_the_same_is_learned(monkeypatch, caplog, least_bytes, really, boundaries):
    """Streamed with updates by host threads, whose counters the GPU may not see either."""
    placement = Placement(slots=3, layer_inputs=boundaries)
    steps = make_batches(3)

    def trained():
        with engine_of(llama(), placement=placement) as engine:
            for step in steps:
                engine.step(step)
            return masters(engine)

    wanted = trained()
    assert "cannot be pinned" not in caplog.text
    runtime = Refusing(torch.cuda.cudart(), least_bytes, really=really)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert same(trained(), wanted)
    warnings = [record for record in caplog.records if "cannot be pinned" in record.message]
    assert len(warnings) == 1 and "5.5 times slower" in warnings[0].message


@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_steps_that_need_more_and_more_room(boundaries):
    """Rows, lanes and rooms are replaced while their last work is still on its way."""
    steps = [make_batches(1, ((2, tokens), (1, 3)), seed=tokens)[0] for tokens in range(4, 60, 8)]
    placement = Placement(slots=3, layer_inputs=boundaries)
    before = parameters(llama())
    for clip in (1.0, None):
        engine = engine_of(llama(), placement=placement, clip=clip)
        other = make_engine(llama(), clip=clip)
        for step in steps:
            one, wanted = engine.step(step), other.step(step)
            assert one.loss == pytest.approx(wanted.loss, rel=1e-4)
            assert one.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)
        assert relative_error(masters(engine), masters(other), before) < 1e-2
        engine.close()


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_bad_loss_changes_nothing_and_the_next_step_counts(clip):
    steps, engines = make_batches(2), [engine_of(llama(), clip=clip) for _ in range(2)]
    for engine in engines:
        engine.step(steps[0])
    bad, before = engines[0], masters(engines[0])
    logits = program_of(bad).logits
    program_of(bad).logits = lambda *arguments: logits(*arguments) * torch.nan
    for _ in range(2):
        with pytest.raises(RunFailed, match="the loss is nan"):
            bad.step(steps[1])
        assert same(masters(bad), before)
    program_of(bad).logits = logits
    assert bad.step(steps[1]).loss == engines[1].step(steps[1]).loss
    assert same(masters(bad), masters(engines[1]))
