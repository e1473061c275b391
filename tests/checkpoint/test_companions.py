"""Exports have what the source folder has beside its weights: Llama-3-Instruct must still stop."""

import shutil

from transformers import GenerationConfig

from megatrain import AdamW, Engine
from megatrain.train.export import export
from tests.checkpoint.cases import batches
from tests.parity.cases import llama

ALONG = {
    "generation_config.json": '{"eos_token_id": [96, 97, 98],\n "temperature": 0.6}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "tokenizer.json": '{"not": "read"}',
    "tokenizer_config.json": '{ "spaces" : 1 }',
    "tokenizer.model": "pieces",
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


def source(folder):
    llama().save_pretrained(folder)
    for name, text in {**ALONG, **NOT}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files(folder):
    found = [path for path in folder.rglob("*") if path.is_file()]
    texts = {path.relative_to(folder).as_posix(): path for path in found}
    assert texts.keys() >= FILES
    return {name: path.read_text() for name, path in texts.items() if name not in FILES}


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
        assert files(tmp_path / name) == ALONG, name
    wanted = GenerationConfig.from_pretrained(tmp_path / "trained")
    assert (wanted.eos_token_id, wanted.temperature) == ([96, 97, 98], 0.6)


def test_the_generation_config_of_a_module_is_exported(tmp_path):
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[5, 6], temperature=0.5, do_sample=True)
    with Engine(model, optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        engine.save_pretrained(tmp_path / "exported")
        engine.save(tmp_path / "saved")
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        again.save_pretrained(tmp_path / "resumed")
    export(str(tmp_path / "saved"), tmp_path / "out")
    for name in ("exported", "resumed", "out"):
        got = GenerationConfig.from_pretrained(tmp_path / name)
        assert (got.eos_token_id, got.temperature, got.do_sample) == ([5, 6], 0.5, True)


def test_what_the_folder_has_already_stays(tmp_path):
    """A tokenizer saved there before is that of the model; generation settings are the model's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    (tmp_path / "out" / "generation_config.json").write_text("of another model")
    with Engine(source(tmp_path / "source"), precision="fp32", device="cpu") as engine:
        engine.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == ALONG | {"tokenizer.json": "mine"}
