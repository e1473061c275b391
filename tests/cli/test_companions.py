"""What a run's model has beside its weights: the files of its source, byte for byte."""

import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.cli.cases import sets, tiny_llama

SETTINGS = '{"eos_token_id": [1, 2, 3],  "temperature": 0.6}'


def write_source(folder, tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model(**tiny_llama(vocab_size=len(tokenizer)))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n\n")
    (folder / "generation_config.json").write_text(SETTINGS)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "vocab.txt").write_text("of a slow tokenizer")
    (folder / "README.md").write_text("scores")
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".json", ".jinja")}


def of_source(run_file, source, **model):
    tree = yaml.safe_load(run_file.read_text()) | {"model": {"path": str(source), **model}}
    run_file.write_text(yaml.safe_dump(tree))


def test_a_run_its_resume_and_its_export_have_the_files_of_the_source(
    megatrain, run_file, tmp_path, tokenizer_folder
):
    wanted = write_source(tmp_path / "source", tokenizer_folder)
    of_source(run_file, tmp_path / "source")
    for steps, options in ((1, []), (2, ["--resume"])):
        chosen = sets(training__steps=steps, checkpoint__at_end=True)
        result = megatrain("train", run_file, *chosen, *options)
        assert result.exit_code == 0, result.output
        (*_, checkpoint) = sorted((tmp_path / "run" / "checkpoints").iterdir())
        out = tmp_path / f"out-{steps}"
        assert megatrain("export", checkpoint, out).exit_code == 0
        assert (out / "README.md").read_text() != "scores"  # a card of its own
        assert not (tmp_path / "run" / "model" / "README.md").exists()
        for folder in (tmp_path / "run" / "model", out):
            for name in wanted.keys() - {"config.json"}:
                assert (folder / name).read_bytes() == wanted[name], name


def test_another_tokenizer_takes_the_place_of_the_sources(
    megatrain, run_file, tmp_path, tokenizer_folder
):
    """Nothing of the source's is left beside it: transformers would read both."""
    write_source(tmp_path / "source", tokenizer_folder)
    of_source(run_file, tmp_path / "source", tokenizer=str(tokenizer_folder))
    result = megatrain("train", run_file, *sets(training__steps=1))
    assert result.exit_code == 0, result.output
    model = tmp_path / "run" / "model"
    assert (model / "generation_config.json").read_text() == SETTINGS
    assert not {"vocab.txt", "chat_template.jinja"} & {path.name for path in model.iterdir()}
    assert AutoTokenizer.from_pretrained(model).get_vocab()
