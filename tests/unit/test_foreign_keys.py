"""Keys of other trainers are refused with the name of ours, as docs/coming-from.md lists them."""

import re
from pathlib import Path

import pytest

from megatrain.config.foreign import _PLACES, _REASONS, foreign
from megatrain.config.load import validate
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
        ({"use_peft": True}, "use_peft: unknown key; an adapter is a section: adapter: {method"),
        ({"seed": 1}, "seed: unknown key; its name here is training.seed"),
        ({"data": {"weight_decay": 1}}, "unknown key; its name here is optimizer.weight_decay"),
        (
            {"stage": "sft", "dataset": "x", "cutoff_len": 8},
            "; the keys of other trainers: ",
        ),
        ({"training": {"gradient_accumulation_steps": 4}}, "training.batch_size counts the rows"),
    ],
)
def test_a_key_of_another_trainer_is_refused_with_ours(tree, told):
    with pytest.raises(InputError, match=re.escape(told)):
        validate(tree, "run.yaml")


# Of the first column, what is no key of a run file: files, classes, and parts of what is one.
NO_KEYS = {"dataset_info", "columns", "tags", "formatting", "zero_to_fp32", "cpu",
           "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "CPUOffloadPolicy",
           "MixedPrecisionPolicy"}  # fmt: skip


def named() -> dict[str, str]:
    """Each key of another trainer in the document, and what stands beside it."""
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M)
    keys = {n: here for there, here in rows for n in re.findall(r"`(\w+)[^`]*`", there)}
    return {name: here for name, here in keys.items() if name not in NO_KEYS}


def test_each_key_of_the_document_is_answered_and_each_answer_is_in_the_document():
    ours = {place.partition(".")[2] for place in OURS} | set(Config.model_fields)
    assert [name for name in named() if not (foreign(name) or name in ours)] == []
    assert [name for name in {**_PLACES, **_REASONS} if name not in named()] == []
    assert not set(_REASONS) & {place.partition(".")[2] for place in OURS}


# Axolotl has it at the top of its files, for model.path; ours is in `model`, for a base elsewhere.
BOTH = {"base_model"}


def test_what_is_named_exists_and_no_key_of_ours_is_taken_for_another_trainers():
    assert set(_PLACES.values()) <= OURS
    assert {place.partition(".")[2] for place in OURS} & set(_PLACES) == BOTH
    assert not set(Config.model_fields) & set(_PLACES)


def test_the_document_and_the_messages_agree():
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 40
    for there, here in rows:
        product = "` x `" in there
        for name in [] if product else re.findall(r"`(\w+)[`:]", there):
            if (told := foreign(name)) and "its name here is" in told:
                assert told.rpartition(" ")[2] in here, (name, here)
    for key in re.findall(r"`((?:model|data|training|optimizer|schedule|engine|checkpoint|output)"
                          r"\.\w+)", DOCUMENT.read_text(encoding="utf-8")):  # fmt: skip
        assert key in OURS, key
