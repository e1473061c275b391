"""Models with encoders of images: a step is plain training's, in every placement, on all ranks."""

import copy
from functools import partial, wraps

import datasets
import peft
import pytest
import torch
import transformers
import trl
from PIL import Image
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutput

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.compat.transformers import attention_of
from megatrain.integrations import StreamedTrainer
from megatrain.model.attention import BY_IMAGES
from megatrain.model.trained import Trained
from tests.cli.test_images import llava, write_model
from tests.families.media import media_steps, micro_batch, omni
from tests.families.parity import compare
from tests.families.plain import EPS, LR, go_on, plain_training
from tests.families.tiny import tiny_multimodal
from tests.parity.cases import masters, parameters, resumes, same
from tests.parity.ranks import run_ranks
from tests.refusals import refused
from tests.sweeps import few, placements
from tests.unit.trainer_cases import alike, lines

ALL = Trained(train_only=["."])


def tiny(family="qwen3_vl"):
    """A model, and three steps: media and text, text alone, both. Qwen3-VL's has videos, too."""
    model = tiny_multimodal(family)
    return model, media_steps(model, family)


def engine_of(model, **options):
    rule = AdamW(lr=LR, eps=EPS)
    options = {"placement": Placement(), "device": "cpu", "precision": "fp32"} | options
    return Engine(model, optimizer=rule, **options)


CASES = {
    "all": ("qwen3_vl", ALL),
    "a last layer and norm that feed nothing": ("llava", ALL),  # they do not even decay
    "frozen layers between trained ones": ("qwen3_vl", Trained(["visual.blocks"], ["."])),
    "used layers of a tower": ("llava", Trained(["tower.*layers.2", "post_layernorm"], ["."])),
    "frozen layers whose results are counted": ("mistral3", Trained((), ["layers.2"])),
    "a norm behind frozen layers": ("aya_vision", Trained((), ["post_layernorm", "l.layers.2"])),
}


@pytest.mark.parametrize("case", few(CASES, 1, 4, 5))
def test_images_train_as_in_plain_torch(case):
    family, trained = CASES[case]
    model, steps = tiny(family)
    assert not compare(model, Placement(), steps=steps, chosen=trained).failures


def test_a_tower_may_set_features_beside_the_items_of_its_result(monkeypatch):
    """As towers of transformers 5.17 do; pytree does not know them."""
    kind = transformers.LlavaModel
    encode = kind.get_image_features

    @wraps(encode)
    def beside(self, *args, **kwargs):
        whole = encode(self, *args, **kwargs)
        result = BaseModelOutput(last_hidden_state=whole.last_hidden_state)
        result.pooler_output = whole.pooler_output
        return result

    monkeypatch.setattr(kind, "get_image_features", beside)
    model, steps = tiny("llava")
    assert not compare(model, Placement(), steps=steps).failures


def of_kinds(model, *kinds, seed):
    """A micro-batch of two rows with images, sounds or both, in the shapes of Qwen's processor."""

    def make(model, rows, generator):
        return (medium for medium in omni(model, rows, generator) if medium.kind in kinds)

    return micro_batch(model, make, 2, torch.Generator().manual_seed(seed))


def test_encoders_of_images_stay_as_they_are_in_steps_with_sounds_alone():
    model = tiny_multimodal("qwen2_5_omni_thinker")
    of = partial(of_kinds, model)
    steps = [
        [of("image", seed=1), of(seed=2)],
        [of("audio", seed=3), of(seed=4)],
        [of(seed=5)],
        [of("image", "video", "audio", seed=6), of("image", seed=7)],
    ]
    assert not compare(model, Placement(), steps=steps, chosen=ALL).failures


def test_a_run_of_images_and_sounds_goes_on_to_the_bit_and_is_exported_whole(tmp_path):
    model = tiny_multimodal("qwen2_5_omni_thinker")
    model.save_pretrained(tmp_path / "model")
    steps = [[of_kinds(model, kind, seed=1)] for kind in ("image", "image", "audio")]
    options = {"trained": ALL, "verify": "step", "max_grad_norm": None}
    with engine_of(tmp_path / "model", **options) as engine:
        engine.step(steps[0])  # the tile of sounds is one version behind now
        resumes(engine, tmp_path / "saved", steps, verify="step")
        engine.save_pretrained(tmp_path / "trained")
        again = type(model).from_pretrained(tmp_path / "trained", dtype=torch.float32)
        assert same(parameters(again), masters(engine))


def test_features_that_the_forward_changes_in_place_are_refused(monkeypatch):
    kind, held = transformers.LlavaModel, []
    encode, place = kind.get_image_features, kind.get_placeholder_mask

    def noted(self, *args, **kwargs):
        held.append(encode(self, *args, **kwargs))
        return held[-1]

    def changed(self, *args, **kwargs):
        held[-1].pooler_output[0].mul_(2)
        return place(self, *args, **kwargs)

    model, [[batch, *_], *_] = tiny("llava")
    monkeypatch.setattr(kind, "get_image_features", noted)
    monkeypatch.setattr(kind, "get_placeholder_mask", changed)
    with engine_of(model) as engine, pytest.raises(InputError, match="features .* in place"):
        engine.evaluate([batch])


def test_a_model_that_has_run_before_trains_as_in_plain_torch():
    model, steps = tiny()
    model(**{name: value for name, value in steps[2][1].items() if name != "labels"})
    assert model.model.rope_deltas is not None
    assert not compare(model, Placement(), steps=steps, chosen=ALL).failures
    assert model.model.rope_deltas is not None  # the caller's


def test_a_frozen_tower_runs_once_for_each_micro_batch(monkeypatch):
    runs, forward = [], transformers.CLIPVisionModel.forward

    def counted(self, *args, **kwargs):
        runs.append(len(args[0] if args else kwargs["pixel_values"]))
        return forward(self, *args, **kwargs)

    model, [step, *_] = tiny("llava")
    monkeypatch.setattr(transformers.CLIPVisionModel, "forward", counted)
    with engine_of(model, trained=Trained(["vision_tower"])) as engine:
        engine.step(step)  # shows what may be kept
        runs.clear()
        engine.step(step)
    assert runs == [2, 1]


def test_the_first_step_has_the_gradients_of_a_later_one():
    """Though a run that was saved takes it, and SigLIP's features lie otherwise in memory."""
    model, [step, *_] = tiny("llava_onevision")
    with engine_of(model, trained=Trained(["vision_tower"]), precision="bf16") as engine:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        first, later = (engine.step(step) for _ in range(2))
    assert first.grad_norm == later.grad_norm


def test_a_tower_attends_to_all_images_in_one_call_and_no_configuration_says_so():
    model, [step, *_] = tiny("qwen2_5_vl")
    attend, calls = AttentionInterface()[BY_IMAGES], []

    def counted(*args, **kwargs):
        calls.append(len(kwargs["cu_seq_lens_q"]) - 1)
        return attend(*args, **kwargs)

    AttentionInterface.register(BY_IMAGES, counted)
    try:
        with engine_of(model) as engine:
            engine.step(step)
            assert attention_of(engine.config.vision_config) == "sdpa"
    finally:
        AttentionInterface.register(BY_IMAGES, attend)
    assert max(calls) > 1  # images or windows


PLACEMENTS = placements("media")


@pytest.mark.parametrize("placement", few(PLACEMENTS, 1))
def test_placements_are_neutral_for_images(placement):
    model, steps = tiny()
    with engine_of(copy.deepcopy(model), trained=ALL) as engine:
        expected = go_on(engine, steps)
    with engine_of(model, trained=ALL, placement=PLACEMENTS[placement]) as engine:
        results, after = go_on(engine, steps)
    assert results == expected[0] and same(after, expected[1])


def test_no_clipping_leaves_the_encoders_alone_in_steps_on_text():
    model, steps = tiny()
    with engine_of(model, trained=ALL, max_grad_norm=None) as engine:
        engine.step(steps[0])
        before = masters(engine)
        engine.step(steps[1])
        after = masters(engine)
    assert all(torch.equal(before[n], after[n]) == ("visual" in n) for n in before)


def test_ranks_with_and_without_images_train_as_one(tmp_path):
    model, steps = tiny()

    def on_ranks(group):
        parts = [step[group.rank() :: 2] if len(step) > 1 else step for step in steps]
        with engine_of(model, trained=ALL, group=group) as engine:
            return [engine.step(part).loss for part in parts], masters(engine)

    with engine_of(model, trained=ALL) as engine:
        losses = [engine.step([*step[::2], *step[1::2]]).loss for step in steps]
        expected = masters(engine)
    for result in run_ranks(2, tmp_path, on_ranks):
        assert result[0] == pytest.approx(losses, rel=1e-6)
        for name, value in result[1].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def conversations(count, without=()):
    """Questions about pictures of one colour; those numbered in `without` have none."""
    rows = []
    for number in range(count):
        images, asked = [Image.new("RGB", (8, 8), (40 * number, 90, 200 - 30 * number))], "image"
        if number in without:
            images, asked = [], "text"
        question = {"type": asked, "text": "and it?" if asked == "text" else None}
        reply = {"type": "text", "text": f"it is {number}"}
        turns = {"user": question, "assistant": reply}
        messages = [{"role": role, "content": [part]} for role, part in turns.items()]
        rows.append({"images": images, "messages": messages})
    return datasets.Dataset.from_list(rows)


def test_trl_trains_on_conversations_with_pictures_as_without_the_engine(tmp_path):
    write_model(tmp_path / "model", llava)
    data = {"train_dataset": conversations(8, without=(1, 4, 5)), "eval_dataset": conversations(3)}

    def make(kind):
        model = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "model")
        model.model.vision_tower.requires_grad_(False)
        args = trl.SFTConfig(
            str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, learning_rate=LR,
            gradient_accumulation_steps=2, max_length=None, bf16=False, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True, eval_strategy="steps",
            eval_steps=1,
        )  # fmt: skip
        processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
        return kind(model=model, args=args, processing_class=processor, **data)

    options = {"engine_options": {"placement": Placement()}}
    streamed = type("Streamed", (StreamedTrainer, trl.SFTTrainer), options)
    trainer = alike(make, (trl.SFTTrainer, streamed), near=1e-5)[1]
    assert sum("loss" in log or "eval_loss" in log for log in lines(trainer)) == 4
    trainer.save_model(tmp_path / "trained")
    assert (tmp_path / "trained" / "processor_config.json").exists()


def test_logits_and_texts_see_the_images():
    model, [[batch, *_], *_] = tiny()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    length = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        logits = copy.deepcopy(model.eval())(**inputs, use_cache=False).logits
        texts = copy.deepcopy(model).generate(**inputs, **length)
    with engine_of(model) as engine:
        torch.testing.assert_close(engine.logits(inputs), logits, rtol=1e-5, atol=1e-5)
        with engine.whole_model() as streamed:
            assert torch.equal(streamed.generate(**inputs, **length), texts)
        assert engine.step([batch]).loss > 0


@pytest.mark.parametrize(
    ("family", "excluded", "each"),
    few([
        ("qwen3_vl", None, 7), ("qwen3_vl", ["o_proj"], 6), ("mllama", None, 7),
        ("qwen2_audio", None, 7),
    ], 1, 2),
)  # fmt: skip
def test_all_linear_adapters_are_of_the_language_model(family, excluded, each, tmp_path):
    model = tiny_multimodal(family)
    model.save_pretrained(tmp_path)
    adapter = {"r": 2, "target_modules": "all-linear", "exclude_modules": excluded}
    with engine_of(tmp_path, adapter=adapter) as engine:
        [group] = engine.optimizer.param_groups
        names = group["param_names"]
        assert len(names) == 2 * each * 3 and all("language_model.layers" in name for name in names)
        step = media_steps(model, family)[0] if family == "qwen3_vl" else [text_batch()]
        assert engine.step(step).grad_norm > 0
        engine.save_pretrained(tmp_path / "adapter")
    base = type(model).from_pretrained(tmp_path)
    held = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    assert sum("lora_" in name for name in held) == len(names)


def test_an_excluded_name_that_no_module_has_is_refused_with_encoders_too():
    adapter = {"r": 2, "target_modules": "all-linear", "exclude_modules": ["oproj"]}
    with pytest.raises(InputError, match="no module 'oproj' .exclude_modules"):
        engine_of(tiny_multimodal("qwen3_vl"), adapter=adapter)


def text_batch():
    ids = torch.arange(1, 13).view(2, 6)
    return {"input_ids": ids, "labels": ids}


def test_adapters_of_encoders_and_text_train_as_in_peft():
    model, steps = tiny()
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv", "linear_fc1"])
    adapted = peft.get_peft_model(model, wanted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trained = plain_training(adapted.get_base_model(), steps)
    with engine_of(adapted) as engine:
        results = [engine.step(step) for step in steps]
    assert [result.loss for result in results] == pytest.approx(trained.losses, rel=1e-6)
    assert [result.grad_norm for result in results] == pytest.approx(trained.norms, rel=1e-5)


def test_what_encoders_cannot_have_is_refused():
    model, [[batch, *_], *_] = tiny("llava")
    without = torch.full_like(batch["input_ids"], 20)  # no placeholders
    with engine_of(model, trained=ALL) as engine:
        with refused("pixel_values must be a tensor of finite numbers"):
            engine.step([batch | {"pixel_values": batch["pixel_values"] / 0}])
        with refused("with pixel_values cannot be run: Image features .* do not match.*; give all"):
            engine.step([batch | {"input_ids": without}])


def test_features_that_are_added_after_the_last_layer_are_refused():
    model, [[batch, text, *_], *_] = tiny()
    model.config.text_config.num_hidden_layers = 2
    with engine_of(type(model)(model.config)) as engine:
        with pytest.raises(InputError, match=r"layers\.1, the forward does more with features"):
            engine.step([batch])
        engine.step([text])
