"""The command in processes that lack what other systems lack: a Mac, and torch for ROCm."""

import json
import os
import subprocess
import sys

from safetensors.torch import load_file

from tests.cli.cases import sets
from tests.parity.cases import same
from tests.refusals import table
from tests.structure.source_tree import ROOT

MAIN = "from megatrain.cli import main; main()"

MAC, ROCM, LOOK = map(table(__file__, "planted.yaml").get, ("mac", "rocm", "look"))


def run(prelude, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MEGATRAIN_HOST_MEMORY", None)
    code = f"{prelude}\nimport sys; sys.argv = ['megatrain', *sys.argv[1:]]\n{MAIN}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_needs_nothing_of_linux(run_file, tmp_path, megatrain):
    """With planes on a disk, too: the model is the one that comes out with all that Linux has."""
    short = sets(training__steps=2, training__eval_every=None, engine__disk=str(tmp_path))
    short += sets(engine__placement__disk_moments=2)
    megatrain.done("train", run_file, *short, *sets(output__folder=str(tmp_path / "here")))
    run(MAC, "train", run_file, *short, *sets(output__folder=str(tmp_path / "mac")))
    folders = [tmp_path / name / "model" / "model.safetensors" for name in ("here", "mac")]
    assert same(*map(load_file, folders))


def test_torch_for_rocm_plans_where_there_is_no_gpu_and_no_file_of_the_system(run_file):
    sizes = ("--host-memory", "512GiB", "--device-memory", "192GiB", "--cores", 32)
    told = run(ROCM + MAC + LOOK, "plan", run_file, "--gpu", "MI300X", *sizes, "--json")
    plan = json.loads(told)
    assert plan["fits"] is True and plan["forecast"]["tokens_per_step"] == 128
