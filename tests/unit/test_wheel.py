"""The wheel of this platform, built and installed where nothing else of the project is."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megatrain import __version__

ROOT = Path(__file__).parents[2]


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_wheel_works_where_it_is_installed(tmp_path):
    pip = (sys.executable, "-m", "pip")
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "wheel", ROOT, *offline, "--wheel-dir", tmp_path, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"megatrain-{__version__}-py3-none-linux_\w+\.whl", wheel.name)

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch, transformers, ...
    shown = run(tmp_path / "venv" / "bin" / "megatrain", "--version", cwd=tmp_path)
    assert shown == f"megatrain {__version__}\n"
    code = "import megatrain.kernels as k; print(k.__file__, k.implementation)"
    file, implementation, *_ = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(site) and implementation == "native"
    assert (site / "megatrain" / "examples" / "demo.yaml").is_file()
    assert (site / "megatrain" / "docs" / "coming-from.md").is_file()
    assert not list(site.rglob("csrc"))
