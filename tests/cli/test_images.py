"""Run files on conversations with images: what is trained is what plain transformers trains."""

import base64
import json
import os
import re
import shutil
from itertools import product
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import transformers
import trl
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.compat.transformers import types_tokens
from megatrain.data import ImageProcessor, PackedDataset, open_dataset
from megatrain.errors import InputError
from megatrain.report import write_report
from megatrain.train.sharing import with_own_images
from tests.cli.cases import records, sets, write_run_file
from tests.cli.test_ranks import assert_same_run, run_of
from tests.families.plain import train_in_place
from tests.inside import answering
from tests.parity.cases import SIZES, noisy, same
from tests.parity.ranks import run_ranks
from tests.sweeps import few
from tests.unit.data_cases import TEMPLATES, make_tokenizer, one_line, write_jsonl

LR = 1e-2
FILE = "model/model.safetensors"
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 8}
TOWER |= {"num_attention_heads": 2, "patch_size": 4}
SQUARE = {"height": 8, "width": 8}
TEXT = SIZES | {"max_position_embeddings": 256}


def tokenizer_of(place, *tokens, kind="image"):
    """A tokenizer whose template writes `place` for a part of a kind."""
    template = one_line(TEMPLATES["chats"]["pictures"]["template"])
    tokenizer = make_tokenizer(template.replace("IMAGE", place).replace("'image'", f"'{kind}'"))
    tokens = ["<|im_start|>", "<|im_end|>", *tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def llava():
    tokenizer = tokenizer_of("<image>", "<image>")
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=SQUARE, crop_size=SQUARE),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,
    )
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT | {"vocab_size": len(tokenizer)}),
        vision_config=transformers.CLIPVisionConfig(**TOWER | {"projection_dim": 8}),
        image_token_index=processor.image_token_id,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def gemma3():
    """Tokens of an image see one another, by `token_type_ids`."""
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    plain = tokenizer_of("<boi>", *named.values())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        **{name: getattr(plain, name) for name in ("eos_token", "pad_token", "chat_template")},
        extra_special_tokens=named,
    )
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size=SQUARE),
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=4,
    )
    text = TEXT | {"vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 16}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<soft>"),
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def idefics3():
    """Large images become several tiles, whose number follows from their sizes."""
    tokenizer = tokenizer_of("<image>", "<image>")
    processor = transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
        ),
        tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=TOWER,
        scale_factor=1,
        image_token_id=processor.image_token_id,
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def onevision():
    """An image is cut into tiles unless its conversation has others."""
    pytest.importorskip("torchvision", reason="processors of films need it")
    tokenizer = tokenizer_of("<image>", "<image>", "<video>")
    grid = [[8, 8], [8, 16], [16, 8], [16, 16]]
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=grid),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=processor.image_token_id,
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grid,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


MODELS = {
    "llava": (llava, "vision_tower"),
    "gemma3": (gemma3, "vision_tower"),
    "idefics3": (idefics3, "vision_model"),
    "onevision": (onevision, "vision_tower"),
}


def write_model(folder, make):
    torch.manual_seed(0)
    model, processor = make()
    noisy(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llava"), llava)


def picture(folder, name, seed, size=(9, 12)):
    """A file of noise; returns its path relative to `folder`."""
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    (folder / name).parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(folder / name)
    return name


def part(path):
    return {"type": "image_url", "image_url": {"url": path}}


def talk(question, answer, **row):
    user = {"role": "user", "content": question}
    return {"messages": [user, {"role": "assistant", "content": answer}], **row}


def conversations(folder):
    """Rows in every notation of images, some without; beside each the images in order."""
    names = [picture(folder, f"pictures/{i}.png", i, (8 + 3 * i, 20 - i)) for i in range(6)]
    data = base64.b64encode((folder / names[5]).read_bytes()).decode()
    text = {"type": "text", "text": "Tell me a short story"}
    return [
        (talk([text, part(names[0])], "The sea was calm."), [0]),
        (talk("What is 12 + 30?", "It is 42."), []),
        (talk("<image>\nthe sea, and <image>", "sunny", images=names[1:3]), [1, 2]),
        (talk([{"type": "image", "path": str(folder / names[3])}, text], "Thanks!"), [3]),
        (talk("What is it?", "You are welcome", image={"path": names[4], "bytes": None}), [4]),
        (talk([text, {"type": "image", "base64": data}], "It is 42."), [5]),
        (talk("Thanks!", "You are welcome"), []),
    ]


def write_run(folder, model, tower, **training):
    rows = folder / "rows.jsonl"
    file = write_run_file(
        folder,
        model,
        model={"path": str(model), "freeze": [tower]},
        data={"path": str(rows), "sequence_length": 224, "packing": False},
        optimizer={"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.0},
        training={"steps": 4, "batch_size": 7, "micro_batch_size": 3} | training,
        schedule={"name": "constant"},
    )
    write_jsonl(rows, [row for row, _ in conversations(folder)])
    return file


def steps(folder):
    return [record for record in records(folder) if "loss" in record or "eval_loss" in record]


def labelled(processor, question, reply, **media):
    """One talk as its model's processor makes it, with labels of the reply."""
    talk = [{"role": "user", "content": question}]
    asked = processor.apply_chat_template(talk, add_generation_prompt=True)
    options = media | {"return_tensors": "pt", "add_special_tokens": False}
    batch = processor(text=[asked + reply + "<|im_end|>\n"], **options)
    prompt = processor(text=[asked], **options)["input_ids"].shape[1]
    labels = batch["input_ids"].clone()
    labels[:, :prompt] = -100
    labels[:, -1] = -100  # the line's end after the turn's
    return {**batch, "labels": labels}


def plain_batches(folder, processor):
    folder = folder.resolve()
    for row, numbers in conversations(folder):
        question, reply = (message["content"] for message in row["messages"])
        if isinstance(question, str):
            before, *after = question.split("<image>") if "images" in row else [question]
            if "image" in row:
                before, after = "", [question]
            texts = [{"type": "text", "text": text} for text in after]
            question = [{"type": "text", "text": before}] if before else []
            question += [p for text in texts for p in ({"type": "image"}, text)]
        elif numbers:
            question = [p if p["type"] == "text" else {"type": "image"} for p in question]
        images = [Image.open(folder / f"pictures/{n}.png") for n in numbers]
        yield labelled(processor, question, reply, images=[images] if images else None)


def assert_plain(run, model, batches, tower):
    """The losses of a run are those of plain training whose steps have these batches."""
    ours = [record["loss"] for record in steps(run)]
    kind = transformers.AutoConfig.from_pretrained(model).architectures[0]
    plain = getattr(transformers, kind).from_pretrained(model, dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(tower not in name)
    trained = train_in_place(plain, [batches] * len(ours), lr=LR, eps=1e-8, weight_decay=0.0)
    assert ours == pytest.approx(trained.losses, rel=1e-6)


@pytest.mark.parametrize(("name", "packing"), few([*product(MODELS, [False, True])], 1, 3))
def test_a_run_with_images_is_plain_training(megatrain, tmp_path, caplog, name, packing):
    make, tower = MODELS[name]
    folder = write_model(tmp_path / "model", make)
    file, rows, shown = write_run(tmp_path, folder, tower), {}, "The sea was calm."
    if packing:
        rows = {"data__packing": True, "data__sequence_length": 96, "training__batch_size": 3}
    if packing and name == "idefics3":  # each image takes 79 tokens or more; the longest row begins
        rows["data__sequence_length"], shown = 240, "sunny"
    megatrain.done("train", file, *sets(**rows))
    assert not packing or " tokens in 3 rows, " in caplog.text
    page = write_report(tmp_path / "run").read_text()
    assert "data:image/jpeg;base64," in page and f"<mark>{shown}" in page
    processor = transformers.AutoProcessor.from_pretrained(folder)
    assert_plain(tmp_path / "run", folder, list(plain_batches(tmp_path, processor)), tower)
    exported = load_file(tmp_path / "run" / FILE)
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    for kept in ("processor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "run/model" / kept).read_bytes() == (folder / kept).read_bytes()


def test_an_adapter_s_own_processor_makes_the_images_it_is_trained_on(megatrain, model, tmp_path):
    file = write_run(tmp_path, model, "no", batch_size=3, steps=1)
    tuned = tmp_path / "tuned"
    adapter = {"adapter__method": "lora", "adapter__target_modules": ["q_proj"]}
    adapter["optimizer__lr"] = 1e-9  # the adapter changes nothing
    megatrain.done("train", file, *sets(**adapter, output__folder=str(tuned)))
    settings = tuned / "model/processor_config.json"
    bright = json.loads(settings.read_text())
    bright["image_processor"]["image_mean"] = [0.9] * 3
    shutil.copytree(model, tmp_path / "whole")
    for folder in (tuned / "model", tmp_path / "whole"):
        (folder / "processor_config.json").write_text(json.dumps(bright))
    losses = []
    for start, keys in ((tuned, {}), (tmp_path / "whole", adapter)):
        keys |= {"model__path": str(start), "output__folder": f"{start}-2"}
        megatrain.done("train", file, *sets(**keys))
        losses.append(steps(tmp_path / f"{start.name}-2")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    machine = ["--gpu", "4090", "--host-memory", "64GiB", "--cores", "8", "--image", "9x12"]
    options = [file, *machine, *sets(model__path=str(tuned))]
    assert megatrain.planned(*options)["forecast"]["device_bytes"]["images"] > 0
    (tuned / "model/processor_config.json").write_text('{"processor_class": "NoProcessor"}')
    megatrain.refused(str(tuned / "model"), "plan", *options)


def gif(path):
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in (0, 90)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def cut_off(path):
    picture(path.parent, path.name, 1, (64, 64))
    path.write_bytes(path.read_bytes()[:900])


WRONG = {
    "missing": (lambda path: None, "a.png: cannot be read: No such file"),
    "cut off": (cut_off, "a.png: not a whole image: .*truncated"),
    "of something else": (lambda path: path.write_text("a") and None, "a.png: not a whole image"),
    "moving": (gif, "a.gif: it has several frames"),
    "of 16 bits": (
        lambda path: Image.fromarray(np.full((8, 8), 999, np.uint16)).save(path),
        "a.png: its pixels have more than 8 bits",
    ),
    "huge": (
        lambda path: Image.new("1", (10_000, 10_000)).save(path),
        "a.png: it has more than 89,478,485 pixels",
    ),
    "a pipe": (lambda path: os.mkfifo(path), "a.png: not a plain file"),
    "an address": (
        lambda path: "https://example.org/a.png",
        "is an address: fetch it, and name the file",
    ),
    "broken base64": (lambda path: "data:image/png;base64,a!", "is not base64"),
    "without a place": (lambda path: 3, "must be a path, a data: address or bytes, not int"),
}


def assert_named(result, problem):
    """A command has ended with one line of error that matches `problem`."""
    assert result.exit_code == 2
    [line] = [line for line in result.output.splitlines() if "error" in line]
    assert re.search(problem, line), line


@pytest.mark.parametrize("case", few(WRONG, 0, 1, 3, 4, 7))
def test_an_image_that_cannot_be_trained_on_is_named_in_one_line(
    megatrain, model, tmp_path, caplog, case
):
    make, problem = WRONG[case]
    name = "a.gif" if case == "moving" else "a.png"
    file = write_run(tmp_path, model, "vision_tower")
    row = talk([part(make(tmp_path / name) or name)], "It is 42.")
    write_jsonl(tmp_path / "rows.jsonl", [*(each for each, _ in conversations(tmp_path)), row])
    assert_named(megatrain("train", file), f"rows.jsonl:8: .*{problem}")
    megatrain.done("data", file, *sets(data__bad_rows="skip"))
    assert "left out 1 bad rows:" in caplog.text


TEXTS = {"prompt": "a", "chosen": "good", "rejected": "bad", "images": ["p.png"]}
REPLY = [part("p.png"), {"type": "text", "text": "a"}]
REFUSED = {
    "pairs of texts": (TEXTS, {"loss__name": "dpo"}, "field 'images': only text, and images of"),
    "texts": ({"text": "a", "images": ["p.png"]}, {}, "field 'images': only text, and images of"),
    "videos": (talk("a", "b", videos=["a.mp4"]), {}, "LlavaProcessor has no place for videos"),
    "a sound": (talk([{"type": "audio", "audio": "a.wav"}], "a"), {}, "no place for audios"),
    "replies": (talk("a", REPLY), {}, "not in replies.*'image_url'"),
    "too few places": (talk("<image>", "a", images=["p.png"] * 2), {}, "2 images .* 1 places"),
    "too many places": (talk("<image><image>", "a", images=["p.png"]), {}, "1 images .* 2 places"),
    "a token in a text": (talk([part("p.png"), {"type": "text", "text": "<image>"}], "a"), {},
                          "has 2 places of images .*the row 1 images"),
    "a token alone": (talk("<image>", "a"), {}, "has the token '<image>', but the row has no"),
}  # fmt: skip


@pytest.mark.parametrize("case", few(REFUSED, 0, 2, 5, 8))
def test_what_is_not_trained_with_images_is_refused_by_name(megatrain, model, tmp_path, case):
    row, keys, problem = REFUSED[case]
    file = write_run(tmp_path, model, "vision_tower")
    picture(tmp_path, "p.png", 1)
    write_jsonl(tmp_path / "rows.jsonl", [row])
    result = megatrain("train", file, *sets(**keys))
    assert result.exit_code == 2
    assert re.search(problem, result.output.replace("\n", " ")), result.output


def test_the_data_command_shows_images(megatrain, model, tmp_path):
    file = write_run(tmp_path, model, "vision_tower")
    output = megatrain.done("data", file, "--rows", "7").output
    for name, size in (("pictures/0.png", "20 x 8"), ("pictures/2.png", "18 x 14")):
        assert f"image {name} ({size}): 4 tokens" in output
    assert "image in the row (15 x 23): 4 tokens" in output
    assert "the sea, and <image> x 4<|im_end|>" in output and "⟦sunny<|im_end|>⟧" in output
    packed = sets(data__packing=True, data__sequence_length=96)
    output = megatrain.done("data", file, *packed).output
    assert "6 images, films and sounds are in 2 of the rows, which are 88% full" in output


def test_plans_count_the_encoder_of_images(megatrain, model, tmp_path):
    options = ["--gpu", "4090", "--host-memory", "64GiB", "--cores", "8", "--sequence-length", 128]
    options += ["--model", model, "--tokens", 1024]
    text = megatrain.planned(*options)
    assert "the plan is for text: --image" in text["warnings"][0]
    seen = megatrain.planned(*options, "--image", "9x12", "--image", "8x8")
    assert not seen["warnings"] and seen["forecast"]["seconds"] > text["forecast"]["seconds"]
    assert seen["forecast"]["device_bytes"]["images"] == 1024 // 128 * 2 * 3 * 8 * 8 * 2
    file = write_run(tmp_path, model, "vision_tower")
    named = {name: sets(model__freeze=[], model__train_only=[name]) for name in (".", "projector")}
    moments = [
        next(tile["planes"]["moments"] for tile in plan["tiles"] if tile["name"] == "media")
        for plan in (
            seen,
            *(megatrain.planned(file, *options[:6], *each) for each in named.values()),
        )
    ]
    assert moments[0] == moments[2] < moments[1] / 2  # a folder's tower is frozen, as in the run
    problems = {"9": "write 9 like 1024x768", "9x123456": "99999 at most"}
    problems["8x8"] = "the images of a row take 4 tokens"
    for image, problem in problems.items():
        size = ["--image", image, "--sequence-length", 2]
        megatrain.refused(problem, "plan", *options, *size)


@pytest.mark.parametrize("typed", [True, False, None])
def test_types_of_tokens_are_asked_as_each_version_of_transformers_says_them(typed):
    """To 5.17 by an option of the processor's text, later by an attribute."""
    of_text = {} if typed is None else {"text_kwargs": {"return_mm_token_type_ids": typed}}
    processor = SimpleNamespace(valid_processor_kwargs=SimpleNamespace(_defaults=of_text))
    assert types_tokens(processor) == bool(typed)
    assert types_tokens(SimpleNamespace(return_mm_token_type_ids=True, **vars(processor)))


def opened(path, model, cache):
    return open_dataset(
        path,
        tokenizer=transformers.AutoTokenizer.from_pretrained(model),
        sequence_length=224,
        cache_dir=cache,
        packing=False,
        images=ImageProcessor(model),
    )


def test_tables_with_bytes_are_the_rows_with_files(model, tmp_path, monkeypatch):
    names = [picture(tmp_path, f"{n}.png", n, (8, 8 + n)) for n in range(3)]
    images = [names[:2], [], names[2:]]
    talks = [talk("<image> and <image>", "a"), talk("b", "c"), talk("d", "It is 42.")]
    rows = [row | {"images": of_row} for row, of_row in zip(talks, images, strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = [[{"bytes": (tmp_path / n).read_bytes(), "path": n} for n in row] for row in images]
    columns = {"messages": [row["messages"] for row in talks], "images": data}
    features = datasets.List(datasets.Image())
    table = datasets.Dataset.from_dict(columns).cast_column("images", features)
    table.to_parquet(tmp_path / "rows.parquet")
    answering(monkeypatch, datasets, load_dataset=table)
    batches = []
    for path in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet", "some/where"):
        data = opened(path, model, tmp_path / "cache")
        batches.append(data.with_images(data.batch(range(3))))
    assert same(batches[0], batches[1]) and same(batches[0], batches[2])
    assert batches[0]["pixel_values"].shape == (3, 3, 8, 8)


def test_an_image_that_changes_is_read_anew_or_ends_the_run(megatrain, model, tmp_path, caplog):
    file = write_run(tmp_path, model, "vision_tower")
    megatrain.done("data", file)
    picture(tmp_path, "pictures/0.png", 9)
    shown = megatrain.done("data", file, "--rows", "7").output
    assert "pictures/0.png has changed: tokens are made again" in caplog.text
    assert "pictures/0.png (12 x 9)" in shown
    looked = PackedDataset.with_images

    def late(data, batch):
        (tmp_path / "pictures/0.png").write_bytes(b"")
        return looked(data, batch)

    with mock.patch.object(PackedDataset, "with_images", late):
        result = megatrain("train", file)
    assert result.exit_code == 4
    assert re.search("step 1: its rows cannot be read: .*the file has changed", result.output)


def test_ranks_read_the_images_of_their_own_rows(model, tmp_path):
    file = write_run(tmp_path, model, "vision_tower")
    data = opened(tmp_path / "rows.jsonl", model, tmp_path / "cache")
    rows = [row for row in range(7) if data.images(row, slice(None))]
    parts = []
    for rank in range(2):
        ranks = SimpleNamespace(rank=rank, size=2)
        step = with_own_images(data, ranks, [data.batch([row]) for row in rows])
        parts.append({number for number, micro in enumerate(step) if "pixel_values" in micro})
    assert all(parts) and not parts[0] & parts[1] and parts[0] | parts[1] == {*range(len(rows))}
    changed = ("training.micro_batch_size=2", "training.batch_size=7", "checkpoint.at_end=false")
    for size, folder in ((2, tmp_path / "two"), (1, tmp_path / "one")):
        run_ranks(size, tmp_path / str(size), run_of(file, folder, *changed, "training.steps=1"))
    assert_same_run(tmp_path / "one", tmp_path / "two")


def pairs(folder):
    """Rows in TRL's format for preferences, without their images, which are beside them."""
    for number in range(5):
        places = [{"type": "image"}] * (number % 3)
        asked = [*places, {"type": "text", "text": "Tell me about the sea" * (1 + number % 2)}]
        names = [picture(folder, f"{number}-{n}.png", 7 * number + n) for n in range(len(places))]
        texts = {"chosen": "The sea was calm." * (1 + number % 2), "rejected": f"never {number}"}
        replies = {
            name: [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
            for name, text in texts.items()
        }
        yield {"prompt": [{"role": "user", "content": asked}], **replies}, names


@pytest.fixture
def ended(model, tmp_path):
    """The model, whose template writes nothing behind the end of a turn, as TRL learns that."""
    folder = shutil.copytree(model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace(r"<|im_end|>\n", "<|im_end|>"))
    return folder


def test_replies_about_pictures_are_preferred_as_by_trl(megatrain, ended, tmp_path):
    rows = [*pairs(tmp_path)]
    file = write_run(tmp_path, ended, "vision_tower", batch_size=5, micro_batch_size=2, steps=3)
    write_jsonl(tmp_path / "rows.jsonl", [row | {"images": names} for row, names in rows])
    megatrain.done("train", file, *sets(loss__name="dpo"))
    seen = [row | {"images": [Image.open(tmp_path / n) for n in names]} for row, names in rows]
    plain = transformers.AutoModelForImageTextToText.from_pretrained(ended, dtype=torch.float32)
    plain.model.vision_tower.requires_grad_(False)
    trainer = trl.DPOTrainer(
        model=plain,
        args=trl.DPOConfig(
            str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=5, learning_rate=LR,
            adam_beta2=0.95, lr_scheduler_type="constant", max_length=None, bf16=False,
            use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(seen),
        processing_class=transformers.AutoProcessor.from_pretrained(ended),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for name in ("loss", "grad_norm"):
        ours = [record[name] for record in steps(tmp_path / "run")]
        assert ours == pytest.approx([log[name] for log in logs], rel=1e-5)


def test_a_teacher_sees_the_pictures(megatrain, model, tmp_path):
    """A model learns nothing of itself: each label gets what is said of it, and no other."""
    file = write_run(tmp_path, model, "vision_tower", steps=1)
    keys = {"loss__name": "distill", "loss__teacher": str(model), "data__eval_fraction": 0.3}
    keys |= {"loss__beta": 0.4, "loss__temperature": 0.7, "optimizer__lr": 1e-12}
    megatrain.done("train", file, *sets(**keys))
    first, evaluated = steps(tmp_path / "run")
    assert [first["loss"], evaluated["eval_loss"]] == pytest.approx([0, 0], abs=1e-6)
    other = shutil.copytree(model, tmp_path / "other")
    settings = json.loads((other / "processor_config.json").read_text())
    (other / "processor_config.json").write_text(json.dumps(settings | {"extra": 1}))
    keys |= {"loss__teacher": str(other), "output__folder": str(tmp_path / "second")}
    megatrain.refused("another processor of images", "train", file, *sets(**keys))
    (other / "processor_config.json").unlink()
    megatrain.refused("has no processor of images; add", "train", file, *sets(**keys))


def test_rows_that_would_be_cut_through_an_image_are_left_out(megatrain, model, tmp_path):
    file = write_run(tmp_path, model, "vision_tower")
    picture(tmp_path, "p.png", 1)
    text = {"type": "text", "text": "Tell me a short story about the sea"}
    late, early = talk("the sea", "It is 42."), talk([part("p.png")], "the sea " * 9)
    late["messages"] += talk([text, part("p.png")], "It is 42.")["messages"]
    write_jsonl(tmp_path / "rows.jsonl", [late, early])
    output = megatrain.done("data", file, *sets(data__sequence_length=24), "--rows", "2").output
    assert "rows.jsonl:2: 24 tokens" in output and "rows.jsonl:1" not in output


def test_generate_replies_to_pictures_as_transformers_does(megatrain, model, tmp_path):
    path = str(tmp_path / picture(tmp_path, "p.png", 1))
    text = {"type": "text", "text": "Tell me"}
    asked = [{"role": "user", "content": [{"type": "image", "path": path}, text]}]
    others = [{"role": "user", "content": "the sea"}]
    write_jsonl(tmp_path / "asked.jsonl", [{"messages": each} for each in (asked, others)])
    options = ["--temperature", "0", "--max-new-tokens", "6", "--precision", "fp32"]
    options += ["--device", "cpu", "--output", str(tmp_path / "replies.jsonl")]
    megatrain.done("generate", model, "--prompts", tmp_path / "asked.jsonl", *options)
    processor = transformers.AutoProcessor.from_pretrained(model)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    placed = [{"role": "user", "content": [{"type": "image"}, text]}]
    prompts = [(placed, Image.open(path)), (others, None)]
    for line, (messages, image) in zip(
        (tmp_path / "replies.jsonl").read_text().splitlines(), prompts, strict=True
    ):
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        batch = processor(images=image, text=[prompt], return_tensors="pt")
        ids = plain.generate(**batch, max_new_tokens=6, do_sample=False)
        reply = processor.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        assert json.loads(line)["completion"] == reply
    said = ["chat", str(model), *options[:-2]]
    shown = CliRunner().invoke(app, said, input=f"/image {path}\nTell me\n\n").output
    first = (tmp_path / "replies.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["completion"].strip() in shown


def test_a_size_that_a_processor_does_not_take_is_named_with_a_remedy(model, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("absolute aspect ratio must be smaller than 200, got 300.0")

    monkeypatch.setattr(transformers.LlavaProcessor, "__call__", refuse)
    with pytest.raises(InputError, match="no image of 1 x 300: absolute.* leave the row out"):
        ImageProcessor(model).replacement("image", (1, 300))
