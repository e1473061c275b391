"""Keys of other trainers are refused with the name of ours, as docs/coming-from.md lists them."""

import re
from pathlib import Path

import pytest

from megatrain.config.load import foreign, validate
from megatrain.config.schema import Config
from megatrain.errors import InputError

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming-from.md"
OURS = {
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    for key in field.annotation.model_fields
}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"learning_rate": 1e-5}, "learning_rate: unknown key; its name here is optimizer.lr"),
        ({"training": {"num_train_epochs": 3}}, "its name here is training.epochs"),
        ({"data": {"cutoff_len": 3}}, "data.cutoff_len: unknown key; its name here is data.seq"),
        ({"lora_r": 16}, "lora_r: unknown key; its name here is adapter.r"),
        ({"use_peft": True}, "use_peft: unknown key; take adapter: {method: lora}: with"),
        ({"seed": 1}, "seed: unknown key; its name here is training.seed"),
        ({"data": {"weight_decay": 1}}, "unknown key; its name here is optimizer.weight_decay"),
        (
            {"stage": "sft", "dataset": "x", "cutoff_len": 8},
            "; the keys of other trainers: ",
        ),
        ({"adam_beta2": 0.9}, "its name here is optimizer.betas"),
        (
            {"optimizer": {"name": "adamw", "beta2_decay": -0.8}},
            "leave it out: they are Adafactor's, given up; without its keys: --set 'optimizer={",
        ),
        ({"adam_epsilon": 1e-9}, "its name here is optimizer.eps"),
        ({"saves_per_epoch": 1}, "its name here is checkpoint.every"),
        ({"gradient_checkpointing": True}, "leave it out: what is kept and what is computed again"),
        ({"resume_from_checkpoint": True}, "take megatrain train run.yaml --resume"),
        ({"dataset_processes": 3}, "dataset_processes: unknown key; it is always so"),
        (
            {"training": {"gradient_accumulation_steps": 4}},
            "is training.batch_size (rows of",
        ),
    ],
)
def test_a_key_of_another_trainer_is_refused_with_ours(tree, told):
    with pytest.raises(InputError, match=re.escape(told)):
        validate(tree, "run.yaml")


# Of the first column, what is no key of a run file: files, classes, and parts of what is one.
NO_KEYS = {"dataset_info", "columns", "tags", "formatting", "zero_to_fp32", "cpu",
           "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "CPUOffloadPolicy",
           "MixedPrecisionPolicy"}  # fmt: skip


def named():
    """Each key of another trainer in the document, and what stands beside it."""
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M)
    keys = {n: here for there, here in rows for n in re.findall(r"`(\w+)[^`]*`", there)}
    return {name: here for name, here in keys.items() if name not in NO_KEYS}


def test_each_key_of_the_document_is_answered_with_keys_that_exist():
    ours = {place.partition(".")[2] for place in OURS}
    assert len(named()) > 200
    for name in named():
        answer = foreign(name)
        assert answer is not None or name in ours, name
        if place := re.match(r"its name here is (\S+?)(?:[:,;]|$| )", answer or ""):
            assert place[1] in OURS, (name, answer)
        assert "`" not in (answer or "") and "](" not in (answer or "")
    for key in re.findall(r"`((?:model|data|training|optimizer|schedule|engine|checkpoint|output)"
                          r"\.\w+)", DOCUMENT.read_text(encoding="utf-8")):  # fmt: skip
        assert key in OURS, key
