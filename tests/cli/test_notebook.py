"""The notebook of the examples: without outputs, and its cells run."""

import json

import matplotlib
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.cli.cases import tiny_llama
from tests.structure.source_tree import ROOT

NOTEBOOK = ROOT / "examples" / "first-run.ipynb"


def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_holds_no_outputs():
    for cell in cells():
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.exhaustive
def test_its_cells_run(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    matplotlib.use("agg")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    changes = tiny_llama(vocab_size=len(tokenizer))
    del changes["model_type"]
    LlamaForCausalLM(LlamaConfig(**changes)).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    names: dict = {"__name__": "notebook"}
    for cell in cells():
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {"MODEL": "tiny", "FOLDER": "run", "STEPS": 6}
    assert (
        names["outcome"].steps == 6
        and sum("eval_loss" in record for record in names["records"]) == 6
    )
    assert (tmp_path / "run" / "tracking" / "tensorboard").is_dir()
    assert all(names["texts"])
