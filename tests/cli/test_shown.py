"""What users are shown runs as it is printed: the tutorial, the README, the notebook, the demo."""

import json
import os
import re
import subprocess
import sys

import matplotlib
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain import config
from megatrain.cli import demo
from tests.cli.cases import tiny_llama
from tests.inside import sized
from tests.structure.source_tree import ROOT

TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"([^`]*(?:`[^`]+`[^`]*)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(TEXT)  # the text before, the language, the content
COMMANDS = "".join(content for _, language, content in BLOCKS if not language).splitlines()
PROGRAMS = [content for _, language, content in BLOCKS if language == "python"]
FILES = {
    names[-1]: content
    for before, language, content in BLOCKS
    if language and (names := re.findall(r"`(\w+\.(?:py|yaml))`", before))
}


def test_the_tutorial_names_what_it_has(tmp_path):
    assert sorted(FILES) == ["make_data.py", "run.yaml", "score.py"]
    assert len(COMMANDS) == 9 and len(PROGRAMS) == 3
    assert all(command.split()[0] in ("megatrain", "python") for command in COMMANDS)
    (tmp_path / "run.yaml").write_text(FILES["run.yaml"], encoding="utf-8")
    assert config.load(tmp_path / "run.yaml", []).training.epochs == 3


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_the_tutorial_teaches_what_it_says(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    program = f'{sys.executable} -c "from megatrain.cli import main; main()"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "xdg"),
                   "HF_HUB_OFFLINE": "1"}  # fmt: skip

    def run(command):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    scores = []
    for line in COMMANDS:
        command = re.sub(r"^python\b", sys.executable, re.sub(r"^megatrain\b", program, line))
        said = run(command)
        scores += [(int(a), int(b)) for a, b in re.findall(r"^(\d+) of (\d+) right$", said, re.M)]
    (before, count), (after, _) = scores
    assert before < 0.1 * count < 0.25 * count < after
    (tmp_path / "use.py").write_text(PROGRAMS[-1], encoding="utf-8")
    assert "generated_text" in run(f"{sys.executable} use.py")


README = ROOT / "README.md"


def test_the_python_example_runs(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert '"Qwen/Qwen2.5-7B"' in code
    ids = torch.randint(0, 100, (2, 8))
    steps = [[{"input_ids": ids, "labels": ids}, {"input_ids": ids[:1], "labels": ids[:1]}]] * 2
    source = str(trained[0] / "model")
    exec(code.replace("Qwen/Qwen2.5-7B", source), {"loader": steps})
    assert len(capsys.readouterr().out.splitlines()) == len(steps)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


NOTEBOOK = ROOT / "examples" / "first-run.ipynb"


def cells():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_holds_no_outputs():
    for cell in cells():
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.exhaustive
def test_the_notebook_s_cells_run(tmp_path, tokenizer_folder, monkeypatch):
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


def test_the_demo_trains_and_samples(megatrain, monkeypatch, tmp_path):
    sized(monkeypatch, demo, CORPUS_BYTES=200_000)
    small = ["training.steps=3", "data.sequence_length=32", "engine.device=cpu"]
    options = [part for override in small for part in ("--set", override)]
    result = megatrain.done("demo", *options)
    (run,) = (tmp_path / "runs").glob("demo-2*")
    assert (run / "model" / "config.json").is_file()
    assert "step 3/3" in result.stdout
    assert "def read_" in result.stdout and " at first, " in result.stdout
