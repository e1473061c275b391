"""The tutorial as it is printed: its files saved, its commands run, and its scores compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain import config

ROOT = Path(__file__).parents[2]
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
