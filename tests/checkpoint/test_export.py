"""A model out of a checkpoint, without its engine; and the benchmark of saves."""

import json
import logging
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from megatrain import AdamW, Engine, InputError
from megatrain.train.export import export
from tests.checkpoint.cases import batches, engine_of, flip
from tests.families.tiny import tiny_model
from tests.parity.cases import in_dtype, llama, masters, parameters, same
from tests.sweeps import swept


def read(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return parameters(model) | dict(model.named_buffers())


def trained(folder, **options):
    engine = engine_of(**options)
    for step in batches(2):
        engine.step(step)
    engine.save(folder)
    return engine


@swept(together=0, precision=["bf16", "fp32"], tied=[False, True])
def test_float32_gives_the_exact_masters(precision, tied, tmp_path):
    model = llama(tie_word_embeddings=tied)
    engine = trained(tmp_path / "saved", model=model, precision=precision)
    export(str(tmp_path / "saved"), tmp_path / "out", "float32")
    assert same({n: read(tmp_path / "out")[n] for n in masters(engine)}, masters(engine))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_files_are_those_that_the_engine_writes(dtype, tmp_path):
    """Down to the byte, and in the dtype of the model that the run began with by default."""
    model = in_dtype(tiny_model("deepseek_v3"), torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[5, 6], temperature=0.5, do_sample=True)
    engine = trained(tmp_path / "saved", model=model, precision="bf16")
    engine.save_pretrained(tmp_path / "wanted", dtype=dtype)
    export(str(tmp_path / "saved"), tmp_path / "out", dtype)
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        again.save_pretrained(tmp_path / "resumed", dtype=dtype)
    names = sorted(path.name for path in (tmp_path / "wanted").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        wanted = (tmp_path / "wanted" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == wanted
        assert (tmp_path / "resumed" / name).read_bytes() == wanted
    told = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (told.eos_token_id, told.temperature, told.do_sample) == ([5, 6], 0.5, True)


def test_numbers_beyond_float16_are_refused(tmp_path):
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    engine = engine_of(model=model)
    with pytest.raises(InputError, match="lm_head.weight has numbers beyond float16's largest"):
        engine.save_pretrained(tmp_path / "out", dtype="float16")
    assert not list(tmp_path.iterdir())
    engine.save_pretrained(tmp_path / "out", dtype="bfloat16")


def test_what_was_attached_comes_along(tmp_path):
    def attach(folder):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "more").mkdir()
        (folder / "more" / "template.jinja").write_text("x")

    engine = engine_of()
    engine.save(tmp_path / "run" / "checkpoints" / "step-1", attach=attach)
    (tmp_path / "run" / "checkpoints" / "step-1" / "model" / "stranger").symlink_to("/etc/passwd")
    export(str(tmp_path / "run"), tmp_path / "out")  # a run that has not finished
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "more" / "template.jinja").read_text() == "x"
    assert not os.path.lexists(tmp_path / "out" / "stranger")
    assert same({n: read(tmp_path / "out")[n] for n in masters(engine)}, masters(engine))


def test_damaged_weights_are_not_exported(tmp_path):
    trained(tmp_path / "saved", precision="bf16")
    tile = tmp_path / "saved" / "tiles" / "0002-layer-0.safetensors"
    for share in (0.001, 0.8, 0.99):
        flip(tile, int(share * tile.stat().st_size))
        with pytest.raises(InputError, match=r"0002-layer-0\.safetensors.*checksum"):
            export(str(tmp_path / "saved"), tmp_path / "out")
        flip(tile, int(share * tile.stat().st_size))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", ["manifest.json", "tiles/0001-prologue.safetensors"])
def test_of_a_run_whose_newest_checkpoint_is_damaged_the_one_before_is_taken_and_said(
    lost, tmp_path, caplog
):
    saved = tmp_path / "run" / "checkpoints"
    trained(saved / "step-1")
    shutil.copytree(saved / "step-1", saved / "step-2")
    (saved / "step-2" / lost).unlink()
    caplog.set_level(logging.INFO)
    export(str(tmp_path / "run"), tmp_path / "out")
    assert f"not used: {saved / 'step-2' / lost}" in caplog.text
    assert f"this is {saved / 'step-1'}" in caplog.text


def test_a_configuration_without_weights_is_no_model(tmp_path):
    """A checkpoint that has lost its manifest looks like one."""
    trained(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").unlink()
    with pytest.raises(InputError, match="without weights"):
        export(str(tmp_path / "saved"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Exports have what the source folder has beside its weights: Llama-3-Instruct must still stop.


ALONG = {
    "generation_config.json": '{"eos_token_id": [96, 97, 98],\n "temperature": 0.6}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "custom_generate/generate.py": "def generate(model, **arguments): ...",
    "tokenizer.json": '{"not": "read"}',
    "tokenizer_config.json": '{ "spaces" : 1 }',
    "tokenizer.model": "pieces",
    "tokenizer.model.v3": "pieces",
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "LICENSE": "terms",
    "USE_POLICY.md": "more terms",
}
NOT = {
    "README.md": "scores of the source",
    ".gitattributes": "",
    "pytorch_model.bin": "x",
    "pytorch_model.bin.index.json": "{}",
    "model.gguf": "x",
    "optimizer.pt": "x",
    "trainer_state.json": "{}",
    "eval_results.json": "{}",
    "modeling_mine.py": "raise SystemExit",
    "original/params.json": "{}",
}
FILES = {"config.json", "model.safetensors"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
LORA = {"target_modules": ["q_proj"]}


def source(folder):
    llama().save_pretrained(folder)
    for name, text in {**ALONG, **NOT}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files_beside(folder, weights=FILES):
    found = [path for path in folder.rglob("*") if path.is_file()]
    texts = {path.relative_to(folder).as_posix(): path for path in found}
    assert texts.keys() >= weights
    return {name: path.read_text() for name, path in texts.items() if name not in weights}


def test_exports_of_every_kind_have_them(tmp_path):
    """After training, from a checkpoint whose source is gone, after a resume, and of an export."""
    folder = source(tmp_path / "source")
    with Engine(folder, optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        shutil.rmtree(folder)
        engine.step(batches(1)[0])
        engine.save_pretrained(tmp_path / "trained")
        engine.save(tmp_path / "saved")
    export(str(tmp_path / "saved"), tmp_path / "out")
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        again.save_pretrained(tmp_path / "resumed")
        again.save(tmp_path / "later")
    export(str(tmp_path / "later"), tmp_path / "latest", "bfloat16")
    export(str(tmp_path / "latest"), tmp_path / "copied", "float16")
    for name in ("trained", "out", "resumed", "latest", "copied"):
        assert files_beside(tmp_path / name) == ALONG, name
    with Engine(tmp_path / "out", adapter=LORA, precision="fp32", device="cpu") as engine:
        engine.save(tmp_path / "adapted")
    export(str(tmp_path / "adapted"), tmp_path / "adapter")
    settings = json.loads(files_beside(tmp_path / "adapter", ADAPTER)["generation_config.json"])
    assert (settings["eos_token_id"], settings["temperature"]) == ([96, 97, 98], 0.6)
    wanted = GenerationConfig.from_pretrained(tmp_path / "trained")
    assert (wanted.eos_token_id, wanted.temperature) == ([96, 97, 98], 0.6)


def test_what_the_folder_has_already_stays(tmp_path):
    """A tokenizer saved there before is that of the model; generation settings are the model's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    (tmp_path / "out" / "generation_config.json").write_text("of another model")
    with Engine(source(tmp_path / "source"), precision="fp32", device="cpu") as engine:
        engine.save_pretrained(tmp_path / "out")
    assert files_beside(tmp_path / "out") == ALONG | {"tokenizer.json": "mine"}
