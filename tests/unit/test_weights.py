"""Weights come in exactly, go out as transformers writes them, or are refused in one line."""

import ctypes
import json
import mmap
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from megatrain.base.whole_files import forget_pages
from megatrain.errors import InputError, RunFailed
from megatrain.model import weights
from megatrain.model.export import write_weights
from megatrain.model.rebuilt import emptied
from megatrain.model.safetensors_io import stored_tensors
from megatrain.model.weights import read_weights, resolve_model, source_dtype
from megatrain.source.source import open_source, structure
from tests.families.tiny import decoder_sizes, tiny_model, tiny_multimodal
from tests.refusals import refused

# Plain; tied; experts fused both ways; a persistent buffer; parameters made in float32 whatever
# the model's dtype; parameters declared so.
FAMILIES = ["llama", "gemma", "mixtral", "qwen3_moe", "deepseek_v3", "zamba", "ernie4_5_moe"]


def saved_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model, saved by transformers itself in the layout of the hub."""
    model = tiny_model(family).to(dtype)
    model.save_pretrained(folder)
    return model


def blank(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its weights, as if it had never been loaded or saved."""
    empty = emptied(model)
    empty._weight_conversions = None
    return empty


def kept_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `read_weights` has to deliver: distinct parameters and persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def read_all(folder: Path, model: PreTrainedModel, threads: int = 2) -> dict[str, Tensor]:
    """Everything `read_weights` delivers; fails when a name comes twice."""
    got: dict[str, Tensor] = {}

    def write(name: str, tensor: Tensor) -> None:
        assert name not in got, f"{name} was written twice"
        got[name] = tensor

    assert read_weights(folder, model, write, threads=threads) == ()
    return got


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def values_of(tensors: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    return {name: (lambda tensor=tensor: tensor) for name, tensor in tensors.items()}


def write_raw(path: Path, header: Any, data: bytes, header_bytes: int | None = None) -> Path:
    """A safetensors file with any header: a text or an object; `header_bytes` may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(first: int, last: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    return {
        "dtype": dtype,
        "shape": [(last - first) // 4] if shape is None else shape,
        "data_offsets": [first, last],
    }


def cached_bytes(path):
    """Bytes of a file that the page cache holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        present = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        room = ctypes.c_void_p(present.ctypes.data)
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), len(mapped), room)
        return mmap.PAGESIZE * int(present.sum())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system keeps what it has read")
def test_a_load_leaves_nothing_in_the_page_cache(tmp_path):
    """Else a driver whose GPU shares the memory takes it for used."""
    model, index, record = sharded(tmp_path)
    files = {tmp_path / name for name in record["weight_map"].values()}
    for path in (*files, index):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # dirty pages stay
    with index.open("rb") as file:
        forget_pages(file.fileno())
    if cached_bytes(index):
        pytest.skip("this file system rests in memory")
    assert sum(map(cached_bytes, files))
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))
    assert len(files) > 2 and not sum(map(cached_bytes, files))


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_wrote(family, tmp_path):
    model = saved_model(family, tmp_path)
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def sharded(folder):
    model = saved_model("llama", folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    index = folder / "model.safetensors.index.json"
    return model, index, json.loads(index.read_text())


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = {
    "model.layers.61.eh_proj.weight": torch.zeros(2),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
}


def fused(model, folder):
    model.save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(folder / "model.safetensors"))


# How a folder may differ from what transformers writes first.
STORED = {
    "fused experts": ("mixtral", fused),
    "fused experts of a class that renames them": ("laguna", fused),
    "shards": ("llama", lambda model, folder: sharded(folder)),
    "the base model": ("gemma", lambda model, folder: model.model.save_pretrained(folder)),
    "a tied head twice": ("gemma", lambda _, folder: edit(
        folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))),
    "a tied head alone": ("gemma", lambda _, folder: edit(
        folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))),
    "tensors that the class ignores": ("deepseek_v3", lambda _, folder: edit(
        folder, lambda tensors: tensors.update(IGNORED))),
}  # fmt: skip


@pytest.mark.parametrize(("family", "store"), STORED.values(), ids=STORED)
def test_reads_other_layouts(family, store, tmp_path):
    model = saved_model(family, tmp_path)
    store(model, tmp_path)
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def test_says_which_tensors_may_be_left_out(tmp_path):
    model = saved_model("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    empty = blank(model)
    empty._keys_to_ignore_on_load_missing = {r"model\.norm"}
    names: list[str] = []
    left_out = read_weights(tmp_path, empty, lambda name, _: names.append(name), threads=2)
    assert left_out == ("model.norm.weight",)
    assert "model.norm.weight" not in names and len(names) == len(kept_tensors(model)) - 1


def test_a_failing_write_ends_the_load(tmp_path):
    model = saved_model("llama", tmp_path)
    calls: list[str] = []

    def write(name, tensor):
        calls.append(name)
        raise MemoryError("no room for it")

    with pytest.raises(MemoryError, match="no room"):
        read_weights(tmp_path, blank(model), write, threads=1)
    assert len(calls) == 1, "what was still to be read must be dropped"


@pytest.mark.parametrize(
    "config",
    [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "float16"}}],
)
def test_source_dtype_is_what_the_config_says(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_dtype(tmp_path) == torch.float16


def test_a_configuration_may_have_its_dtype_in_that_of_the_text():
    """As Qwen3-VL's: plans of an adapter counted a base of fp32."""
    config = tiny_multimodal("qwen3_vl").config
    config.dtype, config.text_config.dtype = None, torch.bfloat16
    source = open_source(config, {"target_modules": ["q_proj"]})
    assert source.dtype == torch.bfloat16 and not structure(source).wide


# Weights go out as transformers would write them, whole or not at all.


def write(folder, model, dtype, most=2**30):
    values = values_of(kept_tensors(model))
    write_weights(folder, blank(model), values, dtype=dtype, max_shard_bytes=most)


def layout(folder):
    return {name: (each.dtype, each.shape) for name, each in stored_tensors(folder).items()}


@pytest.mark.parametrize("max_shard_bytes", [2**30, 60_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_save_pretrained(family, max_shard_bytes, tmp_path):
    model = saved_model(family, tmp_path / "wanted")
    write(tmp_path / "a", model, torch.float32, max_shard_bytes)
    assert layout(tmp_path / "a") == layout(tmp_path / "wanted")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "wanted" / name).read_text()
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values())
    wanted = model.state_dict()
    assert loaded.dtype == torch.float32 and loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


def test_gives_back_the_layout_that_was_read(tmp_path):
    model = saved_model("mixtral", tmp_path / "hub")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    for source in ("hub", "fused"):
        empty = blank(model)
        read_weights(tmp_path / source, empty, lambda name, tensor: None, threads=1)
        write_weights(tmp_path / "a", empty, values_of(kept_tensors(model)), dtype=torch.float32)
        assert layout(tmp_path / "a") == layout(tmp_path / source)
    assert layout(tmp_path / "hub") != layout(tmp_path / "fused")


def test_shards_are_aligned_and_indexed(tmp_path):
    config = LlamaConfig(**decoder_sizes(500, 16, 33, 3, 2), mlp_bias=True)
    model = LlamaForCausalLM(config)
    # Float32 behind odd numbers of bf16 elements, were they in the model's order.
    model._keep_in_fp32_modules_strict = {"post_attention_layernorm", "model.norm"}
    write(tmp_path, model, torch.bfloat16, 9_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = stored_tensors(tmp_path)
    assert {name: each.file.name for name, each in stored.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(each.num_bytes for each in stored.values())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert {each.dtype for each in stored.values()} == {torch.bfloat16, torch.float32}
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    for name, each in stored.items():
        assert each.start % each.dtype.itemsize == 0
        with safe_open(each.file, "pt") as shard:  # the library itself finds the same
            assert torch.equal(shard.get_tensor(name), each.read())


def test_the_configuration_is_not_touched_and_never_in_the_way(tmp_path):
    model = saved_model("llama", tmp_path / "wanted")
    model.config.dtype = torch.float32
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.5)  # refused on save
    values = values_of(kept_tensors(model))
    empty = blank(model)
    write_weights(tmp_path / "a", empty, values, dtype=torch.bfloat16)
    assert empty.config.dtype == torch.float32
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "a/generation_config.json").read_text())["temperature"] == 0.5


def test_replaces_an_export_and_keeps_other_files(tmp_path):
    model = saved_model("llama", tmp_path / "wanted")
    folder = tmp_path / "a"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes/readme.txt").write_text("mine")
    (folder / "tokenizer.json").write_text("{}")
    write(folder, model, torch.float32, 50_000)
    write(folder, model, torch.bfloat16)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {
        "notes", "notes/readme.txt", "tokenizer.json",
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert (folder / "notes/readme.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "wanted"]


@pytest.fixture
def short_files():
    """No file may grow beyond 20 kB: a real failing write, in the middle of a shard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_fails_leaves_nothing(existing, tmp_path, request):
    model = saved_model("llama", tmp_path / "wanted")
    if existing:
        shutil.copytree(tmp_path / "wanted", tmp_path / "a")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    request.getfixturevalue("short_files")
    with pytest.raises(RunFailed, match=r"a: cannot export the model: File too large; nothing"):
        write(tmp_path / "a", model, torch.float32)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".*"))


# Every damaged, hostile or foreign checkpoint: one clear line, before anything is written.

UP = "model.layers.0.mlp.up_proj.weight"


def refusal(folder, model):
    """The message with which a folder is refused, without one tensor written."""
    with refused(re.escape(str(folder))) as caught:
        read_weights(
            folder, blank(model), lambda name, _: pytest.fail(f"{name} was written"), threads=2
        )
    return str(caught.value)


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (UP, None, f"tensor '{UP}' is missing from the checkpoint of a LlamaForCausalLM"),
        (UP, lambda w: w.T, "LlamaForCausalLM needs .* do not belong together"),
        (UP, lambda w: w.to(torch.float8_e4m3fn), "has dtype float8_e4m3fn, and .* floats"),
        ("model.extra", torch.ones(2), "tensor 'model.extra' is unknown to"),
        (UP.removeprefix("model."), torch.ones(2), "is stored again under another name"),
        (EXPERT, lambda w: w.T, "model.layers.0.mlp.experts.down_proj.* wrong shape"),
    ],
)
def test_tensors_that_do_not_fit(name, change, message, tmp_path):
    model = saved_model("mixtral" if name == EXPERT else "llama", tmp_path)

    def put(tensors):
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change if old is None else change(old).contiguous()

    edit(tmp_path, put)
    assert re.search(message, refusal(tmp_path, model))


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
    assert f"'{UP}' is not in the one shard" in refusal(tmp_path, model)
    save_file({UP: torch.zeros(1)}, tmp_path / "again.safetensors")
    index.write_text(json.dumps({"weight_map": files | {"x": "again.safetensors"}}))
    assert f"'{UP}' is not in the one shard" in refusal(tmp_path, model)
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
        (b"\xff\xfe", "its JSON cannot be read"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {"a": 3}}', "which is not in the folder"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' is there twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
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
        (b'{"a":{},"a":{}}', b"", None, r"key 'a' is there twice"),
        ({"a": 1}, b"", None, "damaged or truncated: .*; fetch the file again"),
        ({"a": entry(0, 4) | {"shape": [1] * 99}}, b"1234", None, "'a' has an impossible shape"),
        ({"a": entry(0, 2**62, [2**60])}, b"1234", None, "damaged or truncated"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), None, "damaged or truncated"),
        ({"a": entry(0, 1, [1], "F8_E5M2")}, b"1", None, "'a' is stored as F8_E5M2; only plain"),
    ],
)
def test_a_hostile_header(header, data, length, said, tmp_path):
    path = write_raw(tmp_path / "model.safetensors", header, data, length)
    with refused(said) as caught:
        stored_tensors(tmp_path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def model_folder(folder, *names):
    folder.mkdir()
    for name in ("config.json", *names):
        (folder / name).write_text("{}")
    return folder


def test_pickle_weights_are_refused(tmp_path):
    folder = model_folder(tmp_path / "m", "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pickle weights.*never read; convert them"):
        resolve_model(folder)
    (folder / "model.safetensors").write_text("")
    assert resolve_model(folder) == folder


@pytest.fixture
def hub(monkeypatch):
    """What a download is asked for, and its answer: a folder, or an error."""
    asked: dict[str, Any] = {}

    def download(name, **options):
        asked.update(options)
        if isinstance(asked["answer"], Exception):
            raise asked["answer"]
        return str(asked["answer"])

    monkeypatch.setattr(weights, "snapshot_download", download)
    return asked


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (hub_errors.LocalEntryNotFoundError("x"), "check .*the network"),
        (OSError(28, "No space left on device"), "cannot be had from the hub: No space left"),
        (hub_errors.RepositoryNotFoundError, "no such folder, .*; check the spelling"),
        (hub_errors.GatedRepoError, "accept the terms on its hub page, .*restricts access"),
    ],
)
def test_the_hub_refuses(error, said, hub):
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    hub["answer"] = error("many\nlines", response=response) if isinstance(error, type) else error
    with refused(f"^owner/name: .*{said}"):
        resolve_model("owner/name")


def test_never_downloads_pickles(tmp_path, hub):
    hub["answer"] = folder = model_folder(tmp_path / "m")
    assert resolve_model("owner/name") == folder
    assert not any(each.endswith(("bin", "pt", "pth", "*")) for each in hub["allow_patterns"])
    assert "*.safetensors" in hub["allow_patterns"]
    assert resolve_model("owner/name", weights=False) == folder
    assert "*.safetensors" not in hub["allow_patterns"]
