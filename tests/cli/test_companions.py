"""What a run's model has beside its weights: the files of its source, byte for byte."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.cli.cases import change_run, sets, tiny_llama


def test_a_run_has_the_files_of_its_source_but_those_of_another_tokenizer(
    megatrain, run_file, tmp_path, tokenizer_folder
):
    """Nothing of the source's tokenizer is left beside it: transformers would read both."""
    source = tmp_path / "source"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model(**tiny_llama(vocab_size=len(tokenizer)))
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text() + "\n\n")
    settings = '{"eos_token_id": [1, 2, 3],  "temperature": 0.6}'
    (source / "generation_config.json").write_text(settings)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "vocab.txt").write_text("of a slow tokenizer")
    (source / "README.md").write_text("scores")
    for own in ({}, {"tokenizer": str(tokenizer_folder)}):
        folder = tmp_path / f"run-{len(own)}"
        change_run(run_file, model={"path": str(source)} | own, output={"folder": str(folder)})
        megatrain.done("train", run_file, *sets(training__steps=1))
        [saved] = (folder / "checkpoints").iterdir()
        megatrain.done("export", saved, tmp_path / f"out-{len(own)}")
        for model in (folder / "model", tmp_path / f"out-{len(own)}"):
            assert (model / "generation_config.json").read_text() == settings
            for name in ("tokenizer.json", "chat_template.jinja"):
                same = (model / name).is_file() and (
                    (model / name).read_bytes() == (source / name).read_bytes()
                )
                assert same == (not own), name
            assert (model / "vocab.txt").exists() == (not own)
            assert AutoTokenizer.from_pretrained(model).get_vocab()
    assert not list(tmp_path.glob("out-*/README.md"))
    assert not (tmp_path / "run-0" / "model" / "README.md").exists()
