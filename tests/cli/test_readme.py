"""The Python example of the README runs as it is printed, on a smaller model."""

import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

README = Path(__file__).parents[2] / "README.md"


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
