"""Attention with sinks, caps and windows without masks: transformers' own forms, in less memory."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_with_caps
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megatrain import AdamW, Engine, Placement
from megatrain.compat.transformers import attention_of
from megatrain.model import attention_chunks
from megatrain.model.attention import (
    BY_EAGER,
    BY_MASKS,
    BY_SINKS,
    BY_WINDOWS,
    attend_by_kernel,
    causal_attention,
)
from megatrain.model.build import empty_model
from tests.families.plain import make_steps
from tests.families.tiny import tiny_model
from tests.inside import program_of
from tests.parity.cases import SIZES
from tests.sweeps import swept

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
ROWS, HEADS, SHARED, TOKENS, WIDTH, SCALE = 2, 4, 2, 20, 8, 0.3


def eager(query, key, value, sinks, window, first=0, last=TOKENS, cap=0.0):
    """Of the tokens of one document."""
    at = torch.arange(last - first)
    back = at[:, None] - at[None]
    hidden = (back < 0) | (back >= (window or TOKENS))
    mask = torch.zeros(len(at), len(at)).masked_fill(hidden, -1e30)
    part = (x[:, first:last].transpose(1, 2) for x in (query, key, value))
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=SHARED, training=True)
    if cap:
        return eager_with_caps(module, *part, mask, scaling=SCALE, softcap=cap)[0]
    return eager_attention_forward(module, *part, mask, scaling=SCALE)[0]


@pytest.mark.parametrize("edges", [None, (0, 7, 20, 33, 40)])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("with_sinks", "cap"), [(True, 0.0), (False, 0.0), (False, 0.5)])
@pytest.mark.parametrize("chunks", [{}, {"MOST_LOGITS": 160, "QUERIES": 8, "_ALIGNED": 4}])
def test_the_operation_and_its_gradients_are_those_of_the_eager_form(
    window, edges, with_sinks, cap, chunks, monkeypatch
):
    for name, number in chunks.items():
        monkeypatch.setattr(attention_chunks, name, number)
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, TOKENS, count, WIDTH) for count in (HEADS, HEADS // SHARED, HEADS // SHARED)]
    made = [torch.randn(s, generator=generator, requires_grad=True) for s in (*shapes, (HEADS,))]
    *leaves, sinks = made
    leaves, told = [*leaves, sinks if with_sinks else torch.full((HEADS,), -torch.inf)], None
    if edges is None:
        wanted = eager(*leaves, window, cap=cap)
    else:
        told = torch.tensor(edges, dtype=torch.int32)
        each = [
            eager(*(x[row : row + 1] for x in leaves[:3]), leaves[3], window, first, last, cap)
            for row, ends in enumerate(((0, 7, 20), (0, 13, 20)))
            for first, last in pairwise(ends)
        ]
        wanted = torch.stack((torch.cat(each[:2], 1)[0], torch.cat(each[2:], 1)[0]))
    leaves = leaves[: 3 + with_sinks]
    out, _ = causal_attention(*leaves, *[None] * (not with_sinks), told, TOKENS, window, SCALE, cap)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(x, leaves, direction) for x in (out, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def model(family):
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, **rope}
    caps = {"attn_logit_softcapping": 1.0, "initializer_range": 0.2, "layer_types": KINDS}
    caps["query_pre_attn_scalar"] = 1
    further = {"gpt_oss": experts, "gemma2": caps, "gemma3_text": {"layer_types": KINDS}}
    further = further.get(family, {})
    config = AutoConfig.for_model(family, **sizes, **further, sliding_window=8)
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    return AutoModelForCausalLM.from_config(config, **attention)


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_caps_are_kept_with_every_version_of_transformers(family):
    """Of a configuration; a model that is given computes as it was made."""
    assert attention_of(empty_model(AutoConfig.for_model(family)).config) == "eager"


def losses(precision, micro, family="gpt_oss", *, as_on_gpu=True, **choices):
    """Of two steps, and the name of the attention."""
    rule, at = AdamW(lr=1e-2), Placement(slots=2, **choices)
    with Engine(model(family), optimizer=rule, precision=precision, placement=at) as engine:
        program = program_of(engine)
        if as_on_gpu:
            attend_by_kernel(program.spec, precision)
        result = [engine.step([micro]).loss for _ in range(2)]
        return result, attention_of(program.capture.model.config)


def rows(**more):
    ids = torch.randint(128, (3, 24), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone(), **more}


@pytest.mark.parametrize(
    ("family", "in_fp32", "in_bf16"),
    [
        ("gpt_oss", "eager", BY_SINKS),
        ("gemma2", BY_SINKS, BY_SINKS),
        ("gemma3_text", BY_MASKS, BY_WINDOWS),
    ],
)
def test_layers_attend_so_in_bf16_and_keep_their_form_in_fp32(family, in_fp32, in_bf16):
    exact, name = losses("fp32", rows(), family)
    assert name == in_fp32
    assert exact == pytest.approx(losses("fp32", rows(), family, as_on_gpu=False)[0], rel=1e-6)
    ours, name = losses("bf16", rows(), family)
    assert name == in_bf16 and ours == pytest.approx(exact, rel=5e-3)


def test_packed_rows_with_caps_are_told_their_documents():
    places = torch.cat([torch.arange(10), torch.arange(14)]).expand(3, -1)
    by_masks, name = losses("fp32", rows(position_ids=places), "gemma2", as_on_gpu=False)
    assert name == "eager" and by_masks != pytest.approx(losses("fp32", rows(), "gemma2")[0], 1e-5)
    ours, _ = losses("fp32", rows(position_ids=places), "gemma2")
    assert ours == pytest.approx(by_masks, rel=1e-6)
    # With sinks masks have no documents: by lengths in the eager form's place, and in the kernel's.
    exact, name = losses("fp32", rows(position_ids=places), as_on_gpu=False)
    ours, kernel = losses("bf16", rows(position_ids=places))
    assert (name, kernel) == (BY_EAGER, BY_SINKS) and ours == pytest.approx(exact, rel=5e-3)


def test_kept_attention_is_not_computed_again(monkeypatch):
    calls, capped = [], attention_chunks._capped

    def counted(*args):
        calls.append(args)
        return capped(*args)

    monkeypatch.setattr(attention_chunks, "_capped", counted)
    plain, computed = losses("bf16", rows()), len(calls)
    assert losses("bf16", rows(), save_attention="host") == plain
    steps = 2 * 4  # of a layer; its backward takes the logits, too
    assert (computed, len(calls) - computed) == (3 * steps, 2 * steps)


PADDED = {"end": slice(20, None), "end beyond a window": slice(15, None), "begin": slice(0, 5)}


@swept(together=1, family=["gpt_oss", "gemma2"], place=PADDED)
def test_padded_rows_keep_their_meaning(family, place):
    """The end is learnt, too."""
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, place] = 0
    padded = rows(attention_mask=mask)
    if place.start < 20:
        padded["labels"][mask == 0] = -100
    wanted, _ = losses("fp32", padded, family, as_on_gpu=False)
    assert losses("bf16", padded, family)[0] == pytest.approx(wanted, rel=5e-3)
    assert losses("fp32", padded, family)[0] == pytest.approx(wanted, rel=1e-6)


def test_values_may_be_narrower_than_keys(monkeypatch):
    config = tiny_model("mimo_v2_flash").config
    config.v_head_dim = config.head_dim // 2

    def narrow(family):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)

    monkeypatch.setitem(globals(), "model", narrow)
    ours, name = losses("bf16", rows())
    wanted, _ = losses("bf16", rows(), as_on_gpu=False)
    assert name == BY_SINKS and ours == pytest.approx(wanted, rel=5e-3)


def test_rows_that_are_filled_up_at_their_end_take_no_mask(monkeypatch):
    monkeypatch.setattr("megatrain.compat.transformers.eager_mask", None)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 20:] = 0
    losses("fp32", rows(attention_mask=mask), "gemma2")


@pytest.mark.exhaustive
def test_rows_of_all_lengths_run_compiled(monkeypatch):
    """torch runs a function eagerly, in more memory, that it has compiled too often."""
    for name, number in {"QUERIES": 16, "_ALIGNED": 4}.items():
        monkeypatch.setattr(attention_chunks, name, number)
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: plain(function, backend="eager"))
    monkeypatch.setattr(attention_chunks, "can_compile", lambda: True)
    functions = attention_chunks._weights, attention_chunks._slopes
    compiled = {f: attention_chunks._fused.__wrapped__(f, True) for f in functions}
    monkeypatch.setattr(attention_chunks, "_fused", lambda function, on_gpu: compiled[function])
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for count, tokens in (8, 16), (1, 10), (8, 16), (3, 17), (3, 24), (2, 22), (2, 30), (1, 21):
            x = torch.randn(count, tokens, SHARED, WIDTH, requires_grad=True)
            for lengths in (None, torch.full((count,), tokens, dtype=torch.int32)):
                for window in (0, 6):
                    how = window, SCALE, 0.5, lengths
                    out, _ = causal_attention(x.repeat(1, 1, 2, 1), x, x, None, None, 0, *how)
                    out.sum().backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kept", [{}, {"save_activations": 4}, {"save_activations": 4, "save_all": 4}]
)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_compiled_layers_attend_so(kept, family):
    ours, _ = losses("bf16", rows(), family, compile=True, **kept)
    assert ours == pytest.approx(losses("bf16", rows(), family)[0], rel=1e-3)


WINDOWED = (
    "afmoe beam cohere2 cohere2_moe cohere_compass_text cwm exaone4 exaone_moe gemma3 gemma3_text "
    "gemma3n_text gemma4 gemma4_text gemma4_unified_text kolibri1 lfm3 ministral mistral "
    "modernbert-decoder olmo3 recurrent_gemma"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WINDOWED.split())
def test_each_family_attends_in_the_windows_of_its_masks(family):
    [padded, *_], *_ = make_steps(tiny_model(family).config)
    micro, losses = {name: padded[name] for name in ("input_ids", "labels")}, []
    for name in (BY_MASKS, BY_WINDOWS):
        with Engine(tiny_model(family), optimizer=AdamW(lr=1e-2), precision="fp32") as engine:
            program = program_of(engine)
            if name == BY_WINDOWS:
                attend_by_kernel(program.spec, "bf16")  # without a kernel of fp32: by masks
            assert attention_of(program.capture.model.config.get_text_config()) == name
            losses.append([engine.step([micro]).loss for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
