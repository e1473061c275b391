"""Models with encoders of images: a step is plain training's, in every placement, on all ranks."""

import copy
from functools import partial
from typing import ClassVar

import datasets
import peft
import pytest
import torch
import transformers
import trl
from PIL import Image
from torch.nn import functional as F

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.integrations import StreamedTrainer
from megatrain.loss import Reward
from megatrain.model.trained import Trained
from tests.families.media import micro_batch, omni, pictures
from tests.families.parity import compare
from tests.families.tiny import tiny_multimodal
from tests.parity.cases import SIZES, masters, noisy, same
from tests.parity.ranks import run_ranks
from tests.sweeps import few
from tests.unit.data_cases import make_tokenizer

IMAGE, START, END = 100, 102, 103
TEXT = SIZES | {"head_dim": 8, "pad_token_id": 0}
ALL = Trained(train_only=["."])
LR = 1e-2


def qwen3_vl(**text):
    """Adds features after its first layers, too, and has positions of three kinds."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    tower |= {"patch_size": 4, "temporal_patch_size": 1, "out_hidden_size": 32}
    tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": rope} | text,
        vision_config=tower,
        image_token_id=IMAGE,
        video_token_id=101,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    return noisy(transformers.Qwen3VLForConditionalGeneration(config))


def llava(image_token_index=IMAGE, **text):
    """Projects an inner layer of its tower, whose last layer is never used."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 8}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**(TEXT | text)),
        vision_config=transformers.CLIPVisionConfig(**sizes),
        image_token_index=image_token_index,
    )
    torch.manual_seed(0)
    return noisy(transformers.LlavaForConditionalGeneration(config))


def rows(seed, count, images):
    """Rows that have an image of four tokens each, or none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 90, (count, 11), generator=generator)
    if images:
        ids[:, 2:8] = torch.tensor([START, *[IMAGE] * 4, END])
    labels = ids.masked_fill(ids >= IMAGE, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    return batch, generator


def of_qwen(seed, count=2, images=True):
    batch, generator = rows(seed, count, images)
    kinds = {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}
    if not images:
        return batch | kinds
    grid = torch.tensor([[1, 4, 4]]).repeat(count, 1)
    pixels = torch.randn(16 * count, 3 * 4 * 4, generator=generator)
    return batch | kinds | {"pixel_values": pixels, "image_grid_thw": grid}


def of_llava(seed, count=2, images=True):
    batch, generator = rows(seed, count, images)
    pixels = {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}
    return batch | pixels if images else batch


MODELS = {"qwen3_vl": (qwen3_vl, of_qwen), "llava": (llava, of_llava)}


def steps_of(rows_of):
    """Images and text, text alone, and both in micro-batches of several sizes."""
    return [
        [rows_of(1), rows_of(2, 1, images=False), rows_of(3, 1)],
        [rows_of(4, images=False), rows_of(5, 3, images=False)],
        [rows_of(6, 3, images=False), rows_of(7, 3)],
    ]


def plain(model, steps, frozen):
    """Losses, norms and the model after plain training of what no pattern of `frozen` is in."""
    model = copy.deepcopy(model).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        count = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in step)
        losses.append(0.0)
        for micro in step:
            inputs = {name: value for name, value in micro.items() if name != "labels"}
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), micro["labels"][:, 1:].flatten()) / count
            loss = loss * (micro["labels"][:, 1:] != -100).sum()
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
    return losses, norms, model


def engine_of(model, **options):
    rule = AdamW(lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    options = {"placement": Placement(), "device": "cpu", "precision": "fp32"} | options
    return Engine(model, optimizer=rule, **options)


def assert_equal(engine, steps, expected, start):
    losses, norms, model = expected
    results = [engine.step(step) for step in steps]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-6)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)
    before = dict(start.named_parameters())
    after = masters(engine)
    for name, parameter in model.named_parameters():
        moved, off = (parameter - before[name]).norm(), (after[name] - parameter).norm()
        if not name.endswith("k_proj.bias"):  # no gradient but rounding
            assert off <= 1e-4 * moved, name


CASES = {
    "frozen tower": ("qwen3_vl", Trained(["visual"]), ["visual"]),
    "all": ("qwen3_vl", ALL, []),
    "projector and text": ("llava", Trained(["vision_tower"]), ["vision_tower"]),
    "projector alone": ("qwen3_vl", Trained(train_only=["visual.*merger"]), None),
    "frozen layers between trained ones": (
        "qwen3_vl",
        Trained(["visual.blocks"], ["."]),
        ["visual.blocks"],
    ),
    "used layers of a tower": (
        "llava",
        Trained(["tower.*layers.2", "post_layernorm"], ["."]),
        ["tower.encoder.layers.2", "post_layernorm"],
    ),
}


@pytest.mark.parametrize("case", few(CASES, 1, 2))
def test_images_train_as_in_plain_torch(case):
    name, trained, frozen = CASES[case]
    make, rows_of = MODELS[name]
    model, steps = make(), steps_of(rows_of)
    if frozen is None:  # text alone reaches nothing, and plain torch cannot take such a step
        frozen = [n for n, _ in model.named_parameters() if "merger" not in n]
        steps = [[rows_of(1)], [rows_of(2), rows_of(3, 1)]]
    expected = plain(model, steps, frozen)
    with engine_of(copy.deepcopy(model), trained=trained) as engine:
        assert_equal(engine, steps, expected, model)


def of_kinds(model, *kinds, seed):
    """A micro-batch of two rows with images, sounds or both, in the shapes of Qwen's processor."""

    def make(model, rows, generator):
        return (medium for medium in omni(model, rows, generator) if medium.kind in kinds)

    return micro_batch(model, make, 2, torch.Generator().manual_seed(seed))


def test_what_no_image_or_sound_reaches_stays_as_it_is():
    """Its last layer and norm feed nothing; plain torch does not even let them decay."""
    errors = compare(llava(), Placement(), steps=steps_of(of_llava), chosen=ALL)
    assert not errors.failures


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


def test_a_run_of_images_and_sounds_goes_on_to_the_bit(tmp_path):
    model = tiny_multimodal("qwen2_5_omni_thinker")
    steps = [[of_kinds(model, kind, seed=1)] for kind in ("image", "image", "audio")]
    with engine_of(model, trained=ALL, verify="step", max_grad_norm=None) as engine:
        engine.step(steps[0])
        engine.save(tmp_path)
        before = masters(engine)
        expected = [engine.step(step).loss for step in steps], masters(engine)
    with Engine.load(tmp_path, device="cpu", verify="step") as engine:
        assert same(masters(engine), before)
        assert [engine.step(step).loss for step in steps] == expected[0]
        assert same(masters(engine), expected[1])


def test_results_of_a_frozen_tower_may_be_changed_in_place(monkeypatch):
    kind = transformers.models.llava.modeling_llava.LlavaMultiModalProjector
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, features: forward(self, features.mul_(2)))
    steps = [[of_llava(1), of_llava(2, 1)], [of_llava(3)], [of_llava(4)]]
    assert not compare(llava(), Placement(), steps=steps, chosen=Trained(["vision"])).failures


def test_features_that_the_forward_changes_in_place_are_refused(monkeypatch):
    kind, held = transformers.LlavaModel, []
    encode, place = kind.get_image_features, kind.get_placeholder_mask

    def noted(self, *args, **kwargs):
        held.append(encode(self, *args, **kwargs))
        return held[-1]

    def changed(self, *args, **kwargs):
        held[-1].pooler_output[0].mul_(2)
        return place(self, *args, **kwargs)

    monkeypatch.setattr(kind, "get_image_features", noted)
    monkeypatch.setattr(kind, "get_placeholder_mask", changed)
    with engine_of(llava()) as engine, pytest.raises(InputError, match="features .* in place"):
        engine.evaluate([of_llava(1)])


def test_a_model_that_has_run_before_trains_as_in_plain_torch():
    model, batch = qwen3_vl(), of_qwen(8)
    del batch["labels"]
    model(**batch)
    assert model.model.rope_deltas is not None
    errors = compare(model, Placement(), steps=steps_of(of_qwen), chosen=ALL)
    assert not errors.failures
    assert model.model.rope_deltas is not None  # the caller's


def test_state_that_a_run_on_text_would_read_is_refused(monkeypatch):
    def positions(self, input_ids, inputs_embeds, **kwargs):
        deltas = 0 if self.rope_deltas is None else self.rope_deltas[0, 0]
        return (deltas + torch.arange(input_ids.shape[1])).expand(3, *input_ids.shape)

    model, batch = qwen3_vl(), of_qwen(8)
    del batch["labels"]
    model(**batch)
    monkeypatch.setattr(transformers.Qwen3VLModel, "compute_3d_position_ids", positions)
    with pytest.raises(InputError, match=r"model\.rope_deltas is tensor"):
        engine_of(model)


def test_a_frozen_tower_runs_once_for_each_micro_batch(monkeypatch):
    runs, forward = [], transformers.CLIPVisionModel.forward

    def counted(self, *args, **kwargs):
        runs.append(len(args[0] if args else kwargs["pixel_values"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.CLIPVisionModel, "forward", counted)
    with engine_of(llava(), trained=Trained(["vision_tower"])) as engine:
        engine.step([of_llava(1)])  # shows what may be kept
        runs.clear()
        engine.step([of_llava(2), of_llava(3, 1), of_llava(4, images=False)])
    assert runs == [2, 1]


PLACEMENTS = {
    "inputs on the host": Placement(layer_inputs="host"),
    "passes": Placement(passes=2),
    "on the device": Placement(resident=("media", "prologue", "layer 1")),
    "graphs": Placement(save_activations=2, save_all=1),
    "graphs on the host": Placement(offload_activations=1),
    "rows brought twice": Placement(keep_rows=False),
}


@pytest.mark.parametrize("placement", few(PLACEMENTS, 0, 1))
def test_placements_are_neutral_for_images(placement):
    model, steps = qwen3_vl(), steps_of(of_qwen)
    with engine_of(copy.deepcopy(model), trained=ALL) as engine:
        expected = [engine.step(step).loss for step in steps], masters(engine)
    with engine_of(model, trained=ALL, placement=PLACEMENTS[placement]) as engine:
        assert [engine.step(step).loss for step in steps] == expected[0]
        assert same(masters(engine), expected[1])


def test_no_clipping_leaves_the_encoders_alone_in_steps_on_text():
    model, steps = qwen3_vl(), steps_of(of_qwen)
    with engine_of(model, trained=ALL, max_grad_norm=None) as engine:
        engine.step(steps[0])
        before = masters(engine)
        engine.step(steps[1])
        after = masters(engine)
    assert all(torch.equal(before[n], after[n]) == ("visual" in n) for n in before)


def on_ranks(steps, group):
    parts = [step[group.rank() :: 2] if len(step) > 1 else step for step in steps]
    with engine_of(qwen3_vl(), trained=ALL, group=group) as engine:
        return [engine.step(part).loss for part in parts], masters(engine)


def test_ranks_with_and_without_images_train_as_one(tmp_path):
    steps = steps_of(of_qwen)
    with engine_of(qwen3_vl(), trained=ALL) as engine:
        losses = [engine.step([*step[::2], *step[1::2]]).loss for step in steps]
        expected = masters(engine)
    for result in run_ranks(2, tmp_path, partial(on_ranks, steps)):
        assert result[0] == pytest.approx(losses, rel=1e-6)
        for name, value in result[1].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_run_with_images_resumes_to_the_bit_and_is_exported_whole(tmp_path):
    model, steps = qwen3_vl(), steps_of(of_qwen)
    model.save_pretrained(tmp_path / "model")
    with engine_of(tmp_path / "model", trained=ALL) as engine:
        engine.step(steps[0])
        engine.step(steps[1])  # the encoders' tile is one version behind now
        engine.save(tmp_path / "checkpoint")
        loss = engine.step(steps[2]).loss
        expected = masters(engine)
        engine.save_pretrained(tmp_path / "trained")
    with Engine.load(tmp_path / "checkpoint", device="cpu") as engine:
        assert engine.step(steps[2]).loss == loss
        assert same(masters(engine), expected)
    again = type(model).from_pretrained(tmp_path / "trained", dtype=torch.float32)
    assert same({n: p.detach() for n, p in again.named_parameters()}, expected)


TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}
{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}
{{ eos_token }}{% endfor %}"""


def processor():
    """Makes four tokens of each image."""
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 8, "width": 8}
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def picture(number):
    """A picture of one colour, and the question about it."""
    colour = (40 * number, 90, 200 - 30 * number)
    asked = [{"role": "user", "content": [{"type": "image", "text": None}]}]
    return [Image.new("RGB", (8, 8), colour)], asked


def reply(text):
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def conversations(count, without=()):
    """Questions about pictures; those numbered in `without` have none."""
    rows = []
    for number in range(count):
        images, asked = picture(number)
        if number in without:
            images, asked = [], [{"role": "user", "content": [{"type": "text", "text": "and it?"}]}]
        rows.append({"images": images, "messages": asked + reply(f"it is {number}")})
    return datasets.Dataset.from_list(rows)


def preferences(count):
    """Questions about pictures with two replies."""
    rows = []
    for number in range(count):
        images, asked = picture(number)
        chosen, rejected = reply(f"it is {number}"), reply(f"never {number} at all")
        rows.append({"images": images, "prompt": asked, "chosen": chosen, "rejected": rejected})
    return datasets.Dataset.from_list(rows)


def trained_by(kind, model, folder, config=trl.SFTConfig, **options):
    args = config(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer = kind(model=model, args=args, **options)
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    logs = [[log[name] for name in names if name in log] for log in trainer.state.log_history]
    return trainer, [log for log in logs if log]


def folder_of_llava(folder):
    """A folder with a processor, whose model has a tower that is not trained."""
    processing = processor()
    image, count = processing.image_token_id, len(processing.tokenizer)
    llava(image_token_index=image, vocab_size=count).save_pretrained(folder)
    processing.save_pretrained(folder)
    return processing


def loaded(folder):
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    model.model.vision_tower.requires_grad_(False)
    return model


def assert_trains_alike(plain, tmp_path, **options):
    """A trainer's losses, norms and evaluations are those of one with the engine; returns this."""

    class Streamed(StreamedTrainer, plain):
        engine_options: ClassVar = {"placement": Placement()}

    options["processing_class"] = folder_of_llava(tmp_path / "model")
    trainers, logs = [], []
    for kind in (plain, Streamed):
        trainer, log = trained_by(kind, loaded(tmp_path / "model"), tmp_path / "out", **options)
        trainers.append(trainer)
        logs.append(log)
    assert len(logs[1]) == 4
    for wanted, log in zip(*logs, strict=True):
        assert log == pytest.approx(wanted, rel=1e-5)
    return trainers[1]


def test_trl_trains_on_conversations_with_pictures_as_without_the_engine(tmp_path):
    mixed, held_out = conversations(8, without=(1, 4, 5)), conversations(3)
    trainer = assert_trains_alike(
        trl.SFTTrainer, tmp_path, train_dataset=mixed, eval_dataset=held_out
    )
    trainer.save_model(tmp_path / "trained")
    assert (tmp_path / "trained" / "processor_config.json").exists()


def test_trl_prefers_replies_about_pictures_as_without_the_engine(tmp_path):
    pairs = {"train_dataset": preferences(8), "eval_dataset": preferences(3)}
    assert_trains_alike(trl.DPOTrainer, tmp_path, config=trl.DPOConfig, **pairs)


def test_rewards_of_pictures_train_as_in_plain_torch():
    config = tiny_multimodal("gemma3").config
    config.num_labels = 1
    config.get_text_config().pad_token_id = config.pad_token_id = 0
    model = noisy(transformers.Gemma3ForSequenceClassification(config))
    batch = micro_batch(tiny_multimodal("gemma3"), pictures, 2, torch.Generator().manual_seed(1))
    shape = batch.pop("labels").shape
    plain = copy.deepcopy(model).train()
    scores = plain(**batch).logits[:, 0]
    expected = -F.logsigmoid(scores[0] - scores[1])
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    batch["labels"] = torch.full(shape, -100)
    batch["labels"][:, -1] = 0
    chosen = torch.tensor([[1.0], [0.0]]).repeat(1, shape[1])
    with engine_of(model, trained=ALL) as engine:
        result = engine.step([batch | {"pair": torch.zeros(shape), "chosen": chosen}], Reward())
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_evaluation_and_logits_see_the_images():
    model, batch = qwen3_vl().eval(), of_qwen(1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        expected = copy.deepcopy(model)(**inputs, use_cache=False).logits
    with engine_of(model) as engine:
        torch.testing.assert_close(engine.logits(inputs), expected, rtol=1e-5, atol=1e-5)
        with_images = engine.evaluate([batch])
        batch["pixel_values"] = -batch["pixel_values"]
        assert engine.evaluate([batch]) != with_images


def test_all_linear_adapters_are_of_the_language_model(tmp_path):
    qwen3_vl().save_pretrained(tmp_path)
    adapter = {"r": 2, "target_modules": "all-linear"}
    with engine_of(tmp_path, adapter=adapter) as engine:
        [group] = engine.optimizer.param_groups
        names = group["param_names"]
        assert len(names) == 2 * 7 * 3 and all("language_model.layers" in name for name in names)
        assert engine.step([of_qwen(1)]).grad_norm > 0


def test_adapters_of_encoders_and_text_train_as_in_peft():
    model, steps = qwen3_vl(), steps_of(of_qwen)
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv", "linear_fc1"])
    adapted = peft.get_peft_model(model, wanted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    start = copy.deepcopy(adapted)
    base = [name for name, p in start.named_parameters() if not p.requires_grad]
    losses, norms, _ = plain(adapted, steps, base)
    with engine_of(copy.deepcopy(start)) as engine:
        results = [engine.step(step) for step in steps]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-6)
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5)


def test_the_whole_model_makes_texts_of_images():
    model, batch = qwen3_vl().eval(), of_qwen(1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    length = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = copy.deepcopy(model).generate(**inputs, **length)
    with engine_of(model) as engine:
        with engine.whole_model() as streamed:
            assert torch.equal(streamed.generate(**inputs, **length), expected)
        assert engine.step([batch]).loss > 0


def test_what_encoders_cannot_have_is_refused():
    with engine_of(llava(), trained=ALL) as engine:
        batch = of_llava(1)
        with pytest.raises(InputError, match="pixel_values holds a number that is not finite"):
            engine.step([batch | {"pixel_values": batch["pixel_values"] / 0}])
        del batch["attention_mask"]
        batch["position_ids"] = torch.arange(11).remainder(8).repeat(2, 1)
        with pytest.raises(InputError, match="give each document a row"):
            engine.step([batch])


def test_features_that_are_added_after_the_last_layer_are_refused():
    with engine_of(qwen3_vl(num_hidden_layers=2)) as engine:
        with pytest.raises(InputError, match=r"layers\.1, the forward does more with features"):
            engine.step([of_qwen(1)])
        engine.step([of_qwen(1, images=False)])
