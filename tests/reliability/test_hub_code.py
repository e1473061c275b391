"""What a file says never makes transformers download code and run it."""

import importlib.util
import json
from contextlib import suppress

import pytest
import transformers

from megatrain import Engine
from megatrain.compat.transformers import attention_of, set_attention
from megatrain.errors import InputError
from tests.checkpoint.cases import engine_of
from tests.checkpoint.test_damage import change
from tests.families.tiny import tiny_config

KERNEL = "org/kernel"
KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")


@pytest.fixture
def fetched(monkeypatch):
    """What transformers would download of the hub's kernels, as if `kernels` were installed."""
    names: list[str] = []

    def fetch(name, *args, **kwargs):
        names.append(name)

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fetch)
    return names


@pytest.mark.parametrize("key", KEYS)
def test_a_configuration_does_not_choose_code_of_the_hub(key, fetched, tmp_path):
    tree = tiny_config("mixtral").to_dict() | {key: KERNEL}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="asks for .*'org/kernel', code that would be downloaded"):
        Engine(tmp_path, device="cpu")
    assert not fetched


def test_a_checkpoint_does_not_choose_code_of_the_hub(fetched, tmp_path):
    engine_of().save(tmp_path / "saved")
    change(tmp_path / "saved", lambda c: c["settings"].update(attn_implementation={"": KERNEL}))
    with pytest.raises(InputError, match="code that would be downloaded"):
        Engine.load(tmp_path / "saved", device="cpu")
    assert not fetched
    again = Engine.load(tmp_path / "saved", device="cpu", attn_implementation="sdpa")
    assert attention_of(again.config) == "sdpa"


def test_whoever_asks_for_code_of_the_hub_gets_it(fetched):
    with suppress(InputError):  # there is none
        Engine(tiny_config("llama"), device="cpu", attn_implementation=KERNEL)
    assert set(fetched) == {KERNEL}


def test_flash_attention_of_a_file_is_not_downloaded(monkeypatch, tmp_path):
    """With `kernels` and without `flash_attn`, transformers takes it from the hub."""
    found = importlib.util.find_spec
    here = {"kernels": True, "flash_attn": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: here.get(name) or found(name))
    config = tiny_config("llama")
    set_attention(config, "flash_attention_2")
    with pytest.raises(InputError, match="'flash_attention_2', code that would be downloaded"):
        Engine(config, device="cpu")
