"""The model card that an export of a run has."""

import shutil

import pytest
import yaml
from huggingface_hub import ModelCard

from megatrain.train.export import write_card


def test_an_export_of_a_run_tells_where_it_comes_from(megatrain, trained, talker, tmp_path):
    for number, place in enumerate([trained[0], talker / "checkpoints" / "step-00000040"]):
        out = tmp_path / f"out-{number}"
        megatrain.done("export", place, out)
        card = ModelCard.load(out / "README.md")
        assert card.data.library_name == "transformers" and "megatrain" in card.data.tags
        assert card.data.base_model is None  # a folder of this machine is nobody else's
        assert str(tmp_path.parent) not in card.text
    first, last = (tmp_path / name / "README.md" for name in ("out-0", "out-1"))
    assert "Trained from random weights" in first.read_text() and "6 steps of" in first.read_text()
    assert "Trained from model with MegaTrain" in last.read_text()


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("README.md", "---\nlicense: llama3.1\n---\n# A model", "llama3.1"),
        ("README.md", "---\nlicense: [\n---\n# A broken one", None),
    ],
)
def test_the_licence_is_that_of_the_source(trained, tmp_path, name, text, wanted):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"] |= {"path": str(run), "config": None}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    (run / name).write_text(text)
    write_card(run / "model", run, 3)
    card = ModelCard.load(run / "model" / "README.md")
    assert card.data.license == wanted
