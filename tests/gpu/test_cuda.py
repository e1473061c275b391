"""The engine on a real GPU: the same numbers as on the CPU, the same bits whatever the schedule."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import AdamW, Engine, Placement, kernels
from megatrain.cli.models import qwen2_config
from megatrain.optim import TileRange, UpdateOptions
from tests.families.tiny import decoder_sizes
from tests.rules import FLAT, SWEPT

pytestmark = pytest.mark.gpu

VOCAB = 512


def model(*, tied=False, layers=6):
    torch.manual_seed(0)
    config = LlamaConfig(**decoder_sizes(VOCAB, 128, 256, layers, 4, 2), tie_word_embeddings=tied)
    return LlamaForCausalLM(config)


def steps(count, *, uneven=True):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 64), (1, 48), (3, 32)] if uneven else [(2, 64), (2, 64)]

    def micro(shape):
        ids = torch.randint(VOCAB, shape, generator=generator)
        return {"input_ids": ids, "labels": ids}

    return [[micro(shape) for shape in shapes] for _ in range(count)]


def train(device, batches, *, tied=False, lr=1e-3, **options):
    """Losses, gradient norms and final masters."""
    with Engine(model(tied=tied), optimizer=AdamW(lr=lr), device=device, **options) as engine:
        results = [engine.step(batch) for batch in batches]
        masters = {name: master.clone() for name, master in engine.named_masters()}
    return [r.loss for r in results], [r.grad_norm for r in results], masters


def update_error(got, wanted, tied):
    """Largest distance of a parameter, relative to the norm of its whole update."""
    before = dict(model(tied=tied).named_parameters())
    return max(
        float((got[n] - wanted[n]).norm() / (wanted[n] - before[n].detach()).norm()) for n in wanted
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [0.5, None])
def test_fp32_equals_the_cpu(tied, clip):
    batches = steps(3)
    options = {"precision": "fp32", "tied": tied, "max_grad_norm": clip}
    losses, norms, masters = train("cuda", batches, placement=Placement(slots=3), **options)
    cpu_losses, cpu_norms, cpu_masters = train("cpu", batches, **options)
    assert losses == pytest.approx(cpu_losses, rel=1e-5)
    assert norms == pytest.approx(cpu_norms, rel=1e-4)
    assert update_error(masters, cpu_masters, tied) < 2e-3  # fp32 sums in another order


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_is_the_cpu_within_bf16_noise(tied):
    batches = steps(3)
    losses, norms, _ = train("cuda", batches, placement=Placement(slots=3), tied=tied)
    cpu_losses, cpu_norms, _ = train("cpu", batches, tied=tied)
    assert losses == pytest.approx(cpu_losses, rel=2e-3)
    assert norms == pytest.approx(cpu_norms, rel=2e-2)


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("tied", [False, True])
def test_the_schedule_changes_no_bit(clip, tied):
    batches = steps(4)
    options = {"tied": tied, "max_grad_norm": clip}
    wanted = train("cuda", batches, placement=Placement(slots=1), **options)
    placements = [
        Placement(slots=slots, prefetch=prefetch, layer_inputs=boundaries, layer_input_lanes=lanes)
        for slots, boundaries, lanes in itertools.product((2, 4), ("device", "host"), (1, 4))
        for prefetch in (0, slots - 1)
    ]
    tables = ("embedding", "prologue", "head")
    placements += [
        Placement(slots=2, resident=(*tables, "layer 0", "layer 3")),
        Placement(slots=3, resident=("layer 1",), save_activations=2, layer_inputs="host"),
        Placement(resident=(*tables, *(f"layer {i}" for i in range(6))), save_activations=6),
        Placement(slots=2, keep_weights=4),
        Placement(slots=2, keep_weights=4, passes=2, save_all=2, resident=("layer 2",)),
        Placement(slots=1, gradient_lanes=1, keep_rows=False),
        Placement(slots=3, keep_rows=False, layer_inputs="host", save_activations=2),
        Placement(slots=3, offload_activations=4, save_activations=2),
        Placement(slots=2, offload_activations=6, layer_inputs="host"),
        Placement(slots=3, save_attention="device"),
        Placement(slots=3, save_attention="host", layer_inputs="host", offload_activations=2),
    ]
    for placement in placements:
        losses, norms, masters = train("cuda", batches, placement=placement, **options)
        assert losses == wanted[0], placement
        assert norms == wanted[1], placement
        assert all(torch.equal(masters[n], wanted[2][n]) for n in masters), placement


def test_compiled_is_eager_within_bf16_noise():
    batches = steps(6, uneven=False)
    eager = train("cuda", batches, placement=Placement(slots=3))
    compiled = train("cuda", batches, placement=Placement(slots=3, compile=True))
    assert compiled[0] == pytest.approx(eager[0], rel=2e-3)
    assert compiled[1] == pytest.approx(eager[1], rel=2e-2)


def test_memory_does_not_grow_over_200_steps():
    batches = steps(8)
    with Engine(model(), optimizer=AdamW(lr=1e-3), device="cuda") as engine:
        for index in range(40):
            engine.step(batches[index % 8])
        settled = taken(engine)
        for index in range(160):
            engine.step(batches[index % 8])
        assert taken(engine) == settled


def taken(engine):
    """All memory but what other processes leave free."""
    return {key: size for key, size in engine.memory().items() if key != "device_free_bytes"}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_gpu_updates_as_the_host_does(name, split, grad_dtype):
    generator, rule = torch.Generator().manual_seed(0), SWEPT[name](lr=1e-3, weight_decay=0.1)
    at = (3 << 40) + (1 << 32) - 640  # past a carry from the lower half of the number
    numel = 1_000_003
    master = torch.randn(numel, generator=generator)
    weights, remainder = master.clone(), None
    if split:
        weights, remainder = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel).short()
        kernels.split(master, weights, remainder)
    states = [torch.zeros(-(-numel // p.group_size), dtype=p.dtype) for p in rule.state_planes]
    planes = [weights, remainder, *states]
    there = [None if plane is None else plane.cuda() for plane in planes]
    for step in range(1, 6):
        grad = (torch.randn(numel, generator=generator) * 10**-step).to(grad_dtype)
        grad[:3] = torch.tensor([float("nan"), float("inf"), 0.0])
        for (w, r, *kept), g in ((planes, grad), (there, grad.cuda())):
            rule.update(TileRange(w, r, kept, g), vars(rule), UpdateOptions(at, step, 0.3, 4))
    for plane, other in zip(planes, there, strict=True):
        if plane is not None:
            assert torch.equal(plane.isnan(), other.isnan().cpu())
            assert torch.equal(plane.nan_to_num(7), other.cpu().nan_to_num(7))


def test_the_next_engine_has_all_of_the_gpu():
    """Also while the name of the closed one is still there, as in a notebook."""
    config = qwen2_config("0.5b", 1024, 4)
    ids = torch.randint(1000, (4, 1024))
    for compiled in (False, True, False):
        before = torch.cuda.memory_allocated()
        engine = Engine(config, optimizer=AdamW(), placement=Placement(slots=3, compile=compiled))
        engine.step([{"input_ids": ids, "labels": ids}])
        assert torch.cuda.memory_allocated() - before > 256 << 20
        engine.close()
        assert torch.cuda.memory_allocated() - before < 64 << 20
