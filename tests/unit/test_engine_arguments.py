"""What an engine refuses: one clear line, of the right class, before anything has changed."""

import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain import AdamW, Engine, Placement
from megatrain.loss import DPO
from tests.families.tiny import tiny_config, tiny_model
from tests.refusals import refused, table

VOCAB, POSITIONS = 128, 64


def config():
    return tiny_config("llama")


def refuse(work, message):
    with refused(message) as caught:
        work()
    assert len(str(caught.value)) < 500


SETTINGS = table(__file__, "settings.yaml")["engine"]


@pytest.mark.parametrize("message", SETTINGS)
def test_arguments(message):
    options = {"optimizer": AdamW(), "device": "cpu", **SETTINGS[message]}
    if isinstance(options.get("placement"), dict):
        options["placement"] = Placement(**options["placement"])
    refuse(lambda: Engine(config(), **options), re.escape(message))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_where_there_is_none(name):
    refuse(lambda: Engine(config(), device=name), "torch sees no GPU here")


def test_models_that_are_none(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    refuse(lambda: Engine(None), "the model is a NoneType; give a transformers model")
    refuse(lambda: Engine(tmp_path / "nowhere"), "no such folder")
    refuse(lambda: Engine(file), "not a folder")
    refuse(lambda: Engine(tmp_path), "no config.json there")


def test_models_that_cannot_be_trained():
    refuse(lambda: Engine(AutoConfig.for_model("t5")), "a t5 is no causal language model")
    padded = config()
    padded.pad_token_id = padded.vocab_size
    refuse(
        lambda: Engine(padded),
        rf"pad_token_id is {padded.vocab_size}, and the llama has the tokens",
    )
    empty = config()
    empty.num_hidden_layers = 0
    refuse(lambda: Engine(empty, device="cpu"), "no list of layers")


NOT_STREAMED = {
    "hrm_text": "layers.0 is called more than once in a forward",
    "xlm": "transformer.ffns.1, its forward computes on what earlier layers gave",
    "reformer": "its forward changes .*attention_seed as it runs",
    "zamba": "shared_transf.self_attn.q_proj.weight is the same parameter as",
}


@pytest.mark.parametrize("family", NOT_STREAMED)
def test_models_that_cannot_be_streamed_are_refused_with_the_reason(family):
    refuse(lambda: Engine(tiny_model(family), device="cpu"), NOT_STREAMED[family])


IDS = torch.randint(10, 100, (2, 8), generator=torch.Generator().manual_seed(0))
GOOD = {"input_ids": IDS, "labels": IDS}


def changed(**changes):
    """A good micro-batch and a changed one; None leaves a key out."""
    micro = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    return [GOOD, micro]


def each(change):
    return changed(**{key: change(value) for key, value in GOOD.items()})


LONG, PLACES = torch.full((1, POSITIONS + 1), 20), torch.arange(8).repeat(2, 1)
BATCHES: dict[str, Any] = {
    "needs a list of at least one micro-batch; it got none": [],
    "micro-batch 0 is a list; it must be a dictionary of tensors": [[1, 2]],
    "micro-batch 1: input_ids is a list": each(lambda value: value.tolist()),
    "micro-batch 1 has no labels": changed(labels=None),
    "micro-batch 1 has 'pixels', which neither the model's": changed(pixels=IDS),
    "micro-batch 1 has 'use_cache', which": changed(use_cache=IDS),
    "has 'past_key_values', which .* takes for tokens": changed(past_key_values=IDS),
    "has 'cache', which .* takes for tokens": changed(cache=IDS),
    "has 'logits_to_keep', which neither": changed(logits_to_keep=IDS),
    "has 'inputs_embeds', which neither": changed(inputs_embeds=IDS),
    r"labels is \[2, 8\] torch.float32": changed(labels=IDS.float()),
    r"must be \[rows, tokens\], not \[8\]": each(lambda value: value[0]),
    r"must be \[rows, tokens\], not \[0, 8\]": each(lambda value: value[:0]),
    r"labels is \[2, 7\] .* \[2, 8\]": changed(labels=IDS[:, 1:]),
    r"attention_mask is \[1, 8\]": changed(attention_mask=IDS[:1]),
    "micro-batch 1: attention_mask hides all tokens; 1 stands for one": changed(
        attention_mask=torch.zeros_like(IDS)
    ),
    "on meta; it must be .* on the cpu": each(lambda value: value.to("meta")),
    "attention_mask holds 2; 1 stands for a token": changed(attention_mask=PLACES // 4 + 1),
    f"outside the model's .* of {VOCAB}": changed(input_ids=IDS + VOCAB - 10),
    f"micro-batch 1 has rows of {POSITIONS + 1} tokens, but the model has {POSITIONS}": changed(
        input_ids=LONG, labels=LONG
    ),
    f"position_ids holds {POSITIONS}; positions start at 0, and the model has": changed(
        position_ids=PLACES + POSITIONS - 7
    ),
    "position_ids holds -1; positions start at 0": changed(position_ids=PLACES - 1),
    "no token of this step has a label": [{"input_ids": IDS, "labels": IDS * 0 - 100}] * 2,
    "no token of this step": [{key: value[:, :1] for key, value in GOOD.items()}],
}


@pytest.fixture(scope="module")
def engine():
    return Engine(config(), optimizer=AdamW(), device="cpu")


@pytest.mark.parametrize("message", BATCHES)
def test_micro_batches(engine, message):
    refuse(lambda: engine.step(BATCHES[message]), message)
    refuse(lambda: engine.evaluate(BATCHES[message]), message)
    assert engine.optimizer.num_steps == 0


@pytest.mark.parametrize("loss", [DPO, "dpo", 0, lambda logits, labels: 0])
def test_what_is_no_loss(engine, loss):
    refuse(lambda: engine.step([GOOD], loss), "loss is .*; it must be one of megatrain.loss")
    refuse(lambda: engine.evaluate([GOOD], loss), "loss is .*; it must be one of megatrain.loss")
    assert engine.optimizer.num_steps == 0


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.float64])
def test_what_no_export_is_written_in(engine, tmp_path, dtype):
    refuse(lambda: engine.save_pretrained(tmp_path / "model", dtype=dtype), "dtype is")
    assert not (tmp_path / "model").exists()


def test_narrow_integers_and_masks_of_truth_values_are_taken(engine):
    mask = torch.ones_like(IDS)
    mask[:, 6:] = 0
    wanted = engine.evaluate([{**GOOD, "attention_mask": mask}])
    narrow = {name: ids.int() for name, ids in GOOD.items()}
    for other in (mask.bool(), mask.to(torch.uint8)):
        assert engine.evaluate([{**narrow, "attention_mask": other}]) == wanted


def test_it_computes_in_its_own_precision_under_autocast():
    with Engine(config(), device="cpu", precision="fp32") as engine:
        alone = engine.logits(GOOD)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(engine.logits(GOOD), alone)


def test_a_model_without_positions_has_rows_of_any_length():
    engine = Engine(tiny_config("mamba"), device="cpu")
    rows = torch.full((1, 3 * POSITIONS), 20)
    assert engine.evaluate([{"input_ids": rows, "labels": rows}]) > 0


def test_a_model_like_roberta_begins_positions_after_its_padding_token():
    with Engine(tiny_model("roberta"), optimizer=AdamW(), device="cpu") as engine:
        most = POSITIONS - 1 - engine.config.pad_token_id
        row = torch.full((1, most), 20)
        own = {"input_ids": row, "labels": row}
        losses = [engine.evaluate([own])]
        losses += [engine.evaluate([own | {"position_ids": torch.arange(most)[None] + 1}])]
        assert losses[0] == losses[1] > 0
        longer = {name: torch.cat([row, row[:, :1]], 1) for name in own}
        refuse(lambda: engine.step([longer]), f"{most + 1} tokens, but the model has {most}")


def test_hooks_of_saved_tensors_are_refused_and_not_followed(engine):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: 2 * x, lambda x: x):
        refuse(
            lambda: engine.step([GOOD]), "a step runs within torch.autograd.graph.saved_tensors_h"
        )
    assert engine.optimizer.num_steps == 0


class Checkpointed(LlamaDecoderLayer):
    def forward(self, *args, **kwargs):
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def test_a_layer_that_computes_itself_again_in_its_backward():
    model = tiny_model("llama")
    model.model.layers[1].__class__ = Checkpointed
    options = {"device": "cpu", "precision": "fp32", "saveable": False}
    with Engine(model, optimizer=AdamW(lr=1e-3), **options) as engine:
        refuse(lambda: engine.step([GOOD]), "keeps its weights after .* torch.utils.checkpoint")


def test_code_of_a_model_that_does_not_compute_in_bf16():
    model = tiny_model("xlnet")
    with Engine(model, optimizer=AdamW(lr=1e-3), device="cpu", precision="bf16") as engine:
        for call in (engine.step, engine.evaluate):
            refuse(lambda call=call: call([GOOD]), "does not compute in bf16 .* precision to fp32")
