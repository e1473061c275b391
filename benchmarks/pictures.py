"""Teaches a small model of random weights to read: which digit a picture has, of which colour.

    python -m benchmarks.pictures FOLDER

It writes pictures, conversations about them and a LLaVA of 0.2 million parameters, runs `megatrain
train` on all of its parameters, and says how many unseen pictures transformers' `generate` reads
rightly with the model before and after. No GPU is needed. `--json FILE` keeps the result.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from benchmarks.options import write
from megatrain.telemetry.host import commit, environment

SIDE, PATCH = 32, 8
COLOURS = {
    "red": (230, 60, 50),
    "green": (70, 200, 90),
    "blue": (80, 120, 240),
    "yellow": (230, 210, 60),
    "white": (240, 240, 240),
    "violet": (190, 90, 220),
}
ASKED = "which digit has which colour ?"
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ ' </s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def picture(draw: random.Random) -> tuple[Image.Image, str]:
    """A digit of one colour, anywhere on a dark ground, and its name."""
    digit, colour = draw.randrange(10), draw.choice([*COLOURS])
    image = Image.new("RGB", (SIDE, SIDE), tuple(draw.randrange(60) for _ in range(3)))
    size = draw.randrange(22, 27)
    place = draw.randrange(4, 12), draw.randrange(0, 5)
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text(place, str(digit), fill=COLOURS[colour], font=font)
    return image, f"{colour} {digit}"


def write_model(folder: Path) -> None:
    """A LLaVA of random weights, with a tokenizer of the words that it needs."""
    words = ["</s>", "<pad>", "<image>", "user", "assistant", *ASKED.split(), *COLOURS]
    vocabulary = {word: n for n, word in enumerate([*dict.fromkeys(words), *map(str, range(10))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
        chat_template=TEMPLATE,
        padding_side="left",
    )
    size = {"height": SIDE, "width": SIDE}
    LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    common = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(
            **common,
            num_hidden_layers=2,
            num_key_value_heads=4,
            vocab_size=len(tokenizer),
            max_position_embeddings=128,
            initializer_range=0.1,
        ),
        vision_config=CLIPVisionConfig(
            **common,
            num_hidden_layers=2,
            image_size=SIDE,
            patch_size=PATCH,
            initializer_range=0.1,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)


def write_rows(folder: Path, count: int) -> Path:
    """Pictures, and a conversation about each."""
    draw, lines = random.Random(1), []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, name = picture(draw)
        image.save(folder / f"pictures/{number}.png")
        user = {"role": "user", "content": f"<image> {ASKED}"}
        talk = [user, {"role": "assistant", "content": name}]
        lines.append(json.dumps({"messages": talk, "images": [f"pictures/{number}.png"]}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"


def accuracy(folder: Path, seen: Sequence[tuple[Image.Image, str]]) -> float:
    """The share of pictures that a model's likeliest reply names rightly, in transformers."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    part = [{"type": "image"}, {"type": "text", "text": f" {ASKED}"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": part}], add_generation_prompt=True
    )
    right = 0
    for start in range(0, len(seen), 50):
        images, names = zip(*seen[start : start + 50], strict=True)
        batch = processor(images=[*images], text=[text] * len(images), return_tensors="pt")
        ids = model.generate(**batch, max_new_tokens=3, do_sample=False)
        replies = processor.batch_decode(ids[:, batch["input_ids"].shape[1] :], True)
        right += sum(a.split()[:2] == b.split() for a, b in zip(replies, names, strict=True))
    return right / len(seen)


def main() -> None:
    """Write, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder
    write_model(folder / "model")
    draw = random.Random(2)
    seen = [picture(draw) for _ in range(500)]
    tree = {
        "model": {"path": str(folder / "model"), "train_only": ["."]},
        "data": {
            "path": str(write_rows(folder, options.rows)),
            "sequence_length": 32,
            "packing": False,
            "cache_dir": str(folder / "tokens"),
        },
        "optimizer": {"lr": 2e-3, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_steps": 30},
        "training": {"steps": options.steps, "batch_size": 64, "micro_batch_size": 64},
        "engine": {"precision": "fp32"},
        "checkpoint": {"at_end": False},
        "output": {"folder": str(folder / "run"), "log_every": 50},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    before = accuracy(folder / "model", seen)
    command = [sys.executable, "-m", "megatrain", "train", str(folder / "run.yaml")]
    started = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - started
    after = accuracy(folder / "run/model", seen)
    write(
        options.json,
        {
            "benchmark": "pictures",
            "rows": options.rows,
            "steps": options.steps,
            "seen": len(seen),
            "before": before,
            "after": after,
            "seconds": round(seconds, 1),
            "environment": environment("cpu"),
            "commit": commit(),
        },
    )
    print(f"pictures read rightly: {before:.1%} of {len(seen)} before, {after:.1%} after")


if __name__ == "__main__":
    main()
