"""Every damaged, hostile or foreign checkpoint: one clear line, before anything is written."""

import json
import os
import re
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatrain.errors import InputError
from megatrain.model import weights
from megatrain.model.safetensors_io import read_header, stored_tensors
from megatrain.model.weights import read_weights, resolve_model
from tests.unit.weights_cases import blank, entry, saved_model, write_raw

UP = "model.layers.0.mlp.up_proj.weight"


def refusal(folder, model):
    """The message with which a folder is refused, without one tensor written."""
    with pytest.raises(InputError) as caught:
        read_weights(
            folder, blank(model), lambda name, _: pytest.fail(f"{name} was written"), threads=2
        )
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        ("llama", UP, None, f"tensor '{UP}' is missing from the checkpoint of a LlamaForCausalLM"),
        ("llama", UP, lambda w: w.T, "LlamaForCausalLM needs .* do not belong together"),
        ("llama", UP, lambda w: w.to(torch.int8), "has dtype int8; only float weights can be"),
        ("llama", UP, lambda w: w.to(torch.float8_e4m3fn), "has dtype float8_e4m3fn; only float"),
        ("llama", "model.extra", torch.ones(2), "tensor 'model.extra' is unknown to"),
        ("llama", UP.removeprefix("model."), torch.ones(2), "is stored again under another name"),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.1.up_proj.weight",
            None,
            "model.layers.1.mlp.experts.gate_up_proj.* missing",
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.1.w2.weight",
            lambda w: w.T,
            "model.layers.0.mlp.experts.down_proj.* wrong shape",
        ),
    ],
)
def test_tensors_that_do_not_fit(family, name, change, message, tmp_path):
    model = saved_model(family, tmp_path)

    def put(tensors):
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change if old is None else change(old).contiguous()

    edit(tmp_path, put)
    assert re.search(message, refusal(tmp_path, model))


def sharded(folder):
    model = saved_model("llama", folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    index = folder / "model.safetensors.index.json"
    return model, index, json.loads(index.read_text())


def test_a_truncated_shard(tmp_path):
    model, _, content = sharded(tmp_path)
    shard = tmp_path / content["weight_map"][UP]
    os.truncate(shard, shard.stat().st_size - 100)
    message = refusal(tmp_path, model)
    assert f"{shard.name}: damaged or truncated" in message and "fetch the file" in message
    os.truncate(shard, 5)
    assert f"{shard.name}: its JSON cannot be read" in refusal(tmp_path, model)


def test_shards_that_are_not_as_the_index_says(tmp_path):
    model, index, content = sharded(tmp_path)
    files = content["weight_map"]
    other = next(file for file in files.values() if file != files[UP])
    index.write_text(json.dumps({"weight_map": files | {UP: other}}))
    assert f"{other}: no tensor '{UP}'" in refusal(tmp_path, model)
    save_file({UP: torch.zeros(1)}, tmp_path / "again.safetensors")
    index.write_text(json.dumps({"weight_map": files | {"x": "again.safetensors"}}))
    assert "is also in" in refusal(tmp_path, model)
    index.write_text(json.dumps(content))
    (tmp_path / files[UP]).unlink()
    message = refusal(tmp_path, model)
    assert files[UP] in message and "the download is incomplete" in message


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "/etc/passwd", "a/../../b", "a\u202eb", "..", "a\0b"]
)
def test_an_index_that_leaves_the_folder(escape, tmp_path):
    folder = tmp_path / "model"
    model, index, content = sharded(folder)
    save_file({UP: torch.zeros(1)}, tmp_path / "outside.safetensors")
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {UP: escape}}))
    assert f"shard {escape!r}, which is not in the folder" in refusal(folder, model)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "its JSON cannot be read"),
        (b"\xff\xfe", "its JSON cannot be read"),
        (b"[1]", "its JSON is not an object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {"a": 3}}', "which is not in the folder"),
        (b'{"weight_map": {"a": ""}}', "which is not in the folder"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' is there twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"weight_map": ' + b"9" * 5000 + b"}", "its JSON cannot be read"),
        (b'{"' + b"a" * 2000 + b'": 1}', "longer than 1000 characters"),
    ],
)
def test_a_broken_index(text, said, tmp_path):
    model, index, _ = sharded(tmp_path)
    index.write_bytes(text)
    message = refusal(tmp_path, model)
    assert f"{index.name}: " in message and said in message and len(message) < 1000


@pytest.mark.parametrize(
    ("header", "data", "length", "said"),
    [
        (b"", b"", None, r"its JSON cannot be read"),
        (b"", b"", 2**63, r"ask for a header of 9223372036854775808 bytes"),
        (b"{}", b"", 2**32, r"ask for a header of 4294967296 bytes"),
        (b"[]", b"", None, r"its JSON is not an object"),
        (b'{"a":' * 10_000, b"", None, r"nested too deeply"),
        (b'{"a":{},"a":{}}', b"", None, r"key 'a' is there twice"),
        ({"a": 1}, b"", None, "damaged or truncated .*; fetch the file again"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", None, "damaged or truncated"),
        ({"a": entry(0, 4) | {"shape": [-1, -1]}}, b"1234", None, "damaged or truncated"),
        ({"a": entry(0, 4) | {"shape": [1] * 99}}, b"1234", None, "'a' has an impossible shape"),
        ({"a": entry(0, 0, [0, 2**63])}, b"", None, "'a' has an impossible shape"),
        ({"a": entry(0, 4, [2])}, b"1234", None, "damaged or truncated"),
        ({"a": entry(4, 0, [1])}, b"1234", None, "damaged or truncated"),
        ({"a": entry(0, 2**62, [2**60])}, b"1234", None, "damaged or truncated"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), None, "damaged or truncated"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), None, "damaged or truncated"),
        ({"a": entry(0, 4)}, bytes(8), None, "damaged or truncated"),
        ({"a": entry(0, 1, [1], "F8_E5M2")}, b"1", None, "'a' is stored as F8_E5M2; only plain"),
    ],
)
def test_a_hostile_header(header, data, length, said, tmp_path):
    path = write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(InputError, match=said) as caught:
        stored_tensors(tmp_path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 500


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_is_an_input_error_or_harmless(data, tmp_path_factory):
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 8), "b": entry(8, 12, [1, 1])}
    path = write_raw(tmp_path_factory.getbasetemp() / "damaged.safetensors", header, bytes(12))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        tensors = read_header(path)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        for stored in tensors:
            assert stored.read().shape == stored.shape


def model_folder(folder, *names):
    folder.mkdir()
    for name in ("config.json", *names):
        (folder / name).write_text("{}")
    return folder


def test_pickle_weights_are_refused(tmp_path):
    folder = model_folder(tmp_path / "m", "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pickle weights.*never read; convert them"):
        resolve_model(folder)
    with pytest.raises(InputError, match="only pickle weights"):
        stored_tensors(folder)
    (folder / "model.safetensors").write_text("")
    assert resolve_model(folder) == folder


class _Response:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_errors.LocalEntryNotFoundError("x"), "the hub cannot be reached; check the network"),
        (
            hub_errors.OfflineModeIsEnabled("offline mode\nis on"),
            "cannot download it: offline mode",
        ),
        (OSError(28, "No space left on device"), "cannot download it: .*No space left"),
        (RuntimeError(), "cannot download it: RuntimeError"),
        (hub_errors.RepositoryNotFoundError, "no such model on the hub; check the spelling"),
        (hub_errors.GatedRepoError, "restricts access; accept the terms"),
    ],
)
def test_the_hub_refuses(error, said, monkeypatch):
    if isinstance(error, type):
        error = error("many\nlines", response=_Response())

    def download(*_, **__):
        raise error

    monkeypatch.setattr(weights, "snapshot_download", download)
    with pytest.raises(InputError, match=f"^owner/name: .*{said}") as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value)


def test_never_downloads_pickles(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        weights, "snapshot_download", lambda name, **kwargs: asked.update(kwargs) or str(folder)
    )
    assert resolve_model("owner/name") == folder
    assert not any(
        pattern.endswith(("bin", "pt", "pth", "*")) for pattern in asked["allow_patterns"]
    )
