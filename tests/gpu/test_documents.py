"""Packed rows on a GPU: attention that is told documents' lengths does what masks do, in less."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from megatrain import AdamW, Engine, Placement
from megatrain.compat.transformers import attention_of
from megatrain.model.attention import BY_IMAGES, BY_SINKS, BY_WINDOWS, causal_attention
from tests.families.tiny import decoder_sizes
from tests.inside import program_of
from tests.parity.cases import relative_error

pytestmark = pytest.mark.gpu

VOCAB = 512
SIZES = decoder_sizes(VOCAB, 256, 512, 4, 4, 2) | {"max_position_embeddings": 1 << 17}


def mistral(window):
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


def packed(rows, tokens, longest, seed):
    """Documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(VOCAB, (rows, tokens), generator=generator)
    positions = []
    while len(positions) < rows * tokens:
        length = int(torch.randint(1, longest, (), generator=generator))
        left = tokens - len(positions) % tokens
        positions += range(min(length, left))
    return {
        "input_ids": ids_BT,
        "labels": ids_BT,
        "position_ids": torch.tensor(positions).view(rows, tokens),
    }


def updates(engine, batches):
    before = {name: master.clone() for name, master in engine.named_masters()}
    losses = [engine.step(batch).loss for batch in batches]
    return losses, {name: master - before[name] for name, master in engine.named_masters()}


def assert_near(results, rel=2e-3):
    """Losses and updates of two engines are the same but for rounding."""
    (one, moved), (other, wanted) = results
    assert one == pytest.approx(other, rel=rel)
    for name in wanted:
        assert torch.cosine_similarity(moved[name].flatten(), wanted[name].flatten(), 0) > 0.97


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("compiled", [False, True])
def test_lengths_do_what_masks_do(window, compiled):
    batches = [[packed(2, 256, 90, seed), packed(3, 128, 40, seed + 9)] for seed in range(3)]
    results = []
    for by_lengths in (True, False):
        with Engine(
            mistral(window),
            optimizer=AdamW(lr=1e-3),
            device="cuda",
            placement=Placement(compile=compiled),
        ) as engine:
            program_of(engine).may_attend_by_lengths = by_lengths
            results.append(updates(engine, batches))
            assert program_of(engine).attends_by_lengths == by_lengths
    assert_near(results)


def test_long_packed_rows_take_no_mask():
    """Its mask would have 4 GiB."""
    micro = packed(1, 1 << 16, 2000, 0)
    with Engine(mistral(None), optimizer=AdamW(lr=1e-3), device="cuda") as engine:
        engine.step([micro])
        assert program_of(engine).attends_by_lengths
        assert engine.memory()["device_used_peak_bytes"] < 2 << 30


@pytest.mark.parametrize("width", [72, 80])
def test_images_attend_in_one_call_as_they_do_alone(width):
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 64, 68, 200, 1224], dtype=torch.int32, device="cuda")
    query, key, value = torch.randn(3, 1, 4, 1224, width, generator=generator).bfloat16().cuda()
    query.requires_grad_()
    module = torch.nn.Module()
    attend = AttentionInterface()[BY_IMAGES]
    together, _ = attend(module, query, key, value, None, cu_seq_lens_q=edges, max_length_q=1024)
    pairs = itertools.pairwise(edges.tolist())
    images = [[x[:, :, a:b] for x in (query, key, value)] for a, b in pairs]
    alone = torch.cat([F.scaled_dot_product_attention(*x).transpose(1, 2) for x in images], 1)
    assert relative_error({"": together.float()}, {"": alone.float()}) < 0.01
    gradients = [torch.autograd.grad(x.square().sum(), query)[0].float() for x in (together, alone)]
    assert relative_error(*({"": gradient} for gradient in gradients)) < 0.02


def gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES,
        head_dim=64,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=0.5,
        sliding_window=96,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_soft_caps_are_those_of_the_eager_form(precision, compiled):
    """In rows of 1,000 tokens, whose last chunk is shorter; also with padding; of documents."""
    ids = torch.randint(VOCAB, (3, 1000), generator=torch.Generator().manual_seed(3))
    plain = {"input_ids": ids, "labels": ids}
    padded = plain | {
        "attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(930, 1000), 0)
    }
    batches = [[plain, padded], [packed(2, 768, 300, 5)]] * 2
    results = []
    for device in ("cuda", "cpu"):
        at = Placement(compile=compiled) if device == "cuda" else "auto"
        how = {"device": device, "placement": at, "precision": precision}
        with Engine(gemma2(), optimizer=AdamW(lr=1e-3), **how) as engine:
            name = attention_of(program_of(engine).capture.model.config)
            assert name == (BY_SINKS if device == "cuda" else "eager")
            results.append(updates(engine, batches))
    assert_near(results, 2e-3 if precision == "bf16" else 1e-5)


def test_long_rows_with_caps_take_memory_that_grows_with_the_row():
    """All logits of a layer would have 32 GiB in bf16."""
    ids = torch.randint(VOCAB, (1, 1 << 16))
    with Engine(gemma2(), optimizer=AdamW(lr=1e-3), device="cuda") as engine:
        engine.step([{"input_ids": ids, "labels": ids}])
        assert engine.memory()["device_used_peak_bytes"] < 6 << 30


@pytest.mark.parametrize("compiled", [False, True])
def test_plain_rows_attend_in_windows_as_masks_let_them(compiled):
    at, results = Placement(compile=compiled), []
    ids = torch.randint(VOCAB, (3, 256), generator=torch.Generator().manual_seed(0))
    batches = [[{"input_ids": rows, "labels": rows} for rows in ids.split(2)]] * 3
    for device, name in (("cuda", BY_WINDOWS), ("cpu", "sdpa")):
        rule, how = AdamW(lr=1e-3), at if device == "cuda" else None
        with Engine(mistral(24), optimizer=rule, device=device, placement=how or "auto") as engine:
            assert attention_of(program_of(engine).capture.model.config) == name
            results.append(updates(engine, batches))
    assert_near(results)


@pytest.mark.parametrize("edges", [None, (0, 100, 600, 1024, 1200, 2048)])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("sinks", "cap"), [(True, 0.0), (False, 0.0), (False, 2.0), (True, 2.0)])
def test_the_kernel_is_attention_by_logits(window, edges, sinks, cap):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 1024, heads, 64) for heads in (8, 2, 2)]
    leaves = [torch.randn(s, generator=generator).bfloat16() for s in (*shapes, (8,))]
    results = []
    for device in ("cpu", "cuda"):
        on = [leaf.to(device).requires_grad_() for leaf in leaves]
        told = None if edges is None else torch.tensor(edges, dtype=torch.int32, device=device)
        on = on[: 3 + sinks]
        out, whole = causal_attention(*on, *[None] * (not sinks), told, 1024, window, 0.125, cap)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        gradients = torch.autograd.grad(out, on, direction.to(device))
        named = {str(n): x.float().cpu() for n, x in enumerate((out, whole, *gradients))}
        results.append(named)
    assert relative_error(results[1], results[0]) < 0.01
