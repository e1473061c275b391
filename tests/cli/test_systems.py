"""The command in processes that lack what other systems lack: a Mac, and torch for ROCm."""

import json
import os
import subprocess
import sys

from safetensors.torch import load_file

from tests.cli.cases import sets
from tests.parity.cases import same
from tests.structure.source_tree import ROOT

MAIN = "from megatrain.cli import main; main()"

# psutil reads a Mac's figures elsewhere, so it goes on reading them here.
MAC = """
import builtins, fcntl, io, mmap, os, sys
for name in ("sched_getaffinity", "sched_setaffinity", "O_DIRECT", "posix_fadvise",
             "posix_fallocate", "fdatasync", "process_cpu_count"):
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith(("MADV_HUGE", "MAP_NORESERVE"))]:
    delattr(mmap, name)
plain = io.open
def opened(file, *args, **kwargs):
    theirs = sys._getframe(1).f_globals.get("__name__", "").startswith("psutil")
    if not theirs and str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return plain(file, *args, **kwargs)
builtins.open = io.open = opened
"""

ROCM = """
import sys, torch
torch.version.hip, torch.version.cuda = "7.0.51831", None
sys.modules["pynvml"] = None
"""


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


LOOK = """
from pathlib import Path
from megatrain.plan import doctor
facts = doctor.collect("auto", Path("."))
assert (facts.gpu, facts.huge_pages, facts.untested) == (None, None, "AMD's GPUs"), facts
"""


def test_torch_for_rocm_plans_where_there_is_no_gpu_and_no_file_of_the_system(run_file):
    sizes = ("--host-memory", "512GiB", "--device-memory", "192GiB", "--cores", 32)
    told = run(ROCM + MAC + LOOK, "plan", run_file, "--gpu", "MI300X", *sizes, "--json")
    plan = json.loads(told)
    assert plan["fits"] is True and plan["forecast"]["tokens_per_step"] == 128
