"""Documents with images or sounds that share a row: each as if it were alone, or refused."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from megatrain import InputError
from megatrain.compat.transformers import attention_of
from megatrain.model.attention import BY_LENGTHS, attend
from megatrain.model.documents import packed_positions
from megatrain.model.trained import Trained
from tests.families.media import FORMATS, image_format, micro_batch
from tests.families.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tests.families.plain import plain_training
from tests.families.tiny import tiny_multimodal
from tests.parity.cases import gradients
from tests.parity.test_media import engine_of
from tests.sweeps import few

# Positions of three kinds, tokens of an image that see each other, tiles, sounds: what may differ.
APART = ("qwen2_5_vl", "gemma3", "llava", "smolvlm", "qwen3_vl", "internvl", "mistral3", "qwen2_vl",
         "idefics3", "llava_next", "gemma4", "glm4v", "kimi_k25", "qwen2_audio")  # fmt: skip
PADDED = 2  # tokens of another document behind a row's last


def alone(model, family, seed):
    """Three documents of three lengths with media in padded rows, and one of text alone."""
    generator = torch.Generator().manual_seed(seed)
    make = FORMATS.get(family) or image_format(model)
    media = micro_batch(model, make, 3, generator)
    text = micro_batch(model, lambda *_: iter(()), 1, generator)
    tokens = media["input_ids"].shape[1]
    kept = torch.arange(tokens) < torch.tensor([[tokens], [tokens - 3], [tokens - 1]])
    of_tokens = {n for n, v in media.items() if v.shape == kept.shape}
    media |= {n: media[n].where(kept, -100 if n == "labels" else 0) for n in of_tokens}
    return [media | {"attention_mask": kept.long()}, text]


def packed(media, text):
    """The same documents in two rows, with positions that start anew."""
    media = dict(media)
    lengths = media.pop("attention_mask").sum(1).tolist()
    lengths.append(text["input_ids"].shape[1])
    width = max(lengths[0] + lengths[1], lengths[2] + lengths[3]) + PADDED

    def rows(values, padding):
        parts = [v[:n] for v, n in zip(values, lengths, strict=True)]
        pairs = [torch.cat(parts[at : at + 2]) for at in (0, 2)]
        return torch.stack([F.pad(p, (0, width - len(p)), value=padding) for p in pairs])

    for name in ("input_ids", "labels", "mm_token_type_ids", "token_type_ids"):
        if name in media:
            other = text.get(name, torch.zeros_like(text["input_ids"]))
            media[name] = rows([*media[name], *other], -100 if name == "labels" else 0)
    places = rows([torch.arange(n) for n in lengths], -1)
    media["position_ids"] = torch.where(places < 0, (places < 0).cumsum(1) - 1, places)
    media["labels"] = media["labels"].masked_fill(media["position_ids"] == 0, -100)
    return media


@pytest.mark.parametrize("family", few(APART, 0, 2))
def test_packed_documents_train_as_in_plain_torch_alone(family):
    if family == "smolvlm" and transformers.__version__.startswith("5.6."):
        pytest.skip("transformers 5.6 fails on its images")
    model = tiny_multimodal(family).requires_grad_(True)
    steps = [alone(model, family, seed) for seed in range(3)]
    trained = plain_training(model, steps, max_grad_norm=None)
    with engine_of(model, trained=Trained(train_only=["."]), max_grad_norm=1e9) as engine:
        first = engine.step([packed(*steps[0])]).loss
        moved = gradients(engine)
        losses = [first] + [engine.step([packed(*step)]).loss for step in steps[1:]]
    assert first == pytest.approx(trained.losses[0], rel=2e-7)
    assert losses == pytest.approx(trained.losses, rel=LOSS_TOLERANCE)
    errors = [(moved[n] - g).square().sum() for n, g in trained.gradients.items() if g is not None]
    assert sum(errors).sqrt() < GRADIENT_TOLERANCE * trained.norms[0]


def test_lengths_of_sounds_and_rates_of_films_give_positions():
    """Qwen-Omni's forward makes the first of a mask, and has another name for the second."""

    class Omni(nn.Module):
        def get_rope_index(self, input_ids, audio_seqlens, second_per_grids):
            places = audio_seqlens[:, None] + second_per_grids[:, None] + 0 * input_ids
            return places.expand(3, -1, -1), None

    micro = {
        "input_ids": torch.arange(5)[None],
        "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
        "feature_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "video_second_per_grid": torch.tensor([10, 20]),
    }
    positions = packed_positions(Omni(), micro)
    assert positions[:2, 0].tolist() == [[0, 1, 0, 1, 2], [12, 12, 23, 23, 23]]


def test_an_encoder_keeps_its_own_attention_in_packed_rows():
    """Gemma 4's encoder of sounds takes the masks of eager attention alone."""
    model = tiny_multimodal("gemma4")
    config = model.config
    if attention_of(config.audio_config) != "eager":
        pytest.skip("this version of transformers gives the encoder of sounds sdpa, too")
    attend([model], BY_LENGTHS)
    kinds = [attention_of(part) for part in (config.text_config, config.audio_config)]
    assert kinds == [BY_LENGTHS, "eager"]


@pytest.mark.parametrize("family", few(["qwen3_5", "paligemma", "lfm3_vl"]))
def test_models_that_mix_documents_are_refused(family):
    model = tiny_multimodal(family)
    with engine_of(model) as engine, pytest.raises(InputError, match="train it without packing"):
        engine.step([packed(*alone(model, family, 0))])


def test_images_that_touch_across_documents_are_tried_apart_from_others():
    if transformers.__version__.startswith("5.6."):
        pytest.skip("transformers 5.6 keeps images apart that touch")
    model = tiny_multimodal("gemma3")
    micro = packed(*alone(model, "gemma3", 0))
    inside = int(micro["token_type_ids"][0].nonzero()[1])  # the second token of an image
    places = micro["position_ids"].clone()
    until = inside + int((places[0, inside:] == 0).nonzero()[0])
    places[0, inside:until] = torch.arange(until - inside)
    with engine_of(model) as engine:
        engine.step([micro])
        with pytest.raises(InputError, match="train it without packing"):
            engine.step([micro | {"position_ids": places}])


@pytest.mark.parametrize("precision", few(["fp32", "bf16"]))
def test_other_positions_than_the_model_gives_a_document_alone_are_refused(precision, monkeypatch):
    """As those of text, which keep the documents apart."""
    model, family = tiny_multimodal("qwen2_5_vl"), "qwen2_5_vl"
    micro = packed(*alone(model, family, 0))
    with engine_of(model, precision=precision) as engine:
        engine.step([micro])

    of_text = micro["position_ids"].expand(4, -1, -1)
    monkeypatch.setattr("megatrain.model.documents.packed_positions", lambda *_: of_text)
    mixed = pytest.raises(InputError, match="train it without packing")
    with engine_of(model, precision=precision) as engine, mixed:
        engine.step([micro])


def test_text_is_packed_for_a_model_with_positions_of_three_kinds():
    model = tiny_multimodal("qwen2_5_vl")
    ids = [
        torch.randint(10, 90, (1, n), generator=torch.Generator().manual_seed(n)) for n in (7, 9)
    ]
    labels = [part.index_fill(1, torch.tensor([0]), -100) for part in ids]
    together = {"input_ids": torch.cat(ids, 1), "labels": torch.cat(labels, 1)}
    together["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)])[None]
    apart = [{"input_ids": part, "labels": part} for part in ids]
    with engine_of(model) as engine:
        assert engine.evaluate([together]) == pytest.approx(engine.evaluate(apart), rel=2e-7)
