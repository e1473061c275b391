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

MAC, ROCM, LOOK = map(table(__file__, "planted.yaml").get, ("mac", "rocm", "look"))
COMMANDS = """
import json, sys
from megatrain.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["megatrain", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""


def test_runs_and_plans_need_nothing_of_linux_and_no_torch_for_cuda(run_file, tmp_path, megatrain):
    """With planes on a disk, too: the model is the one that comes out with all that Linux has."""
    short = sets(training__steps=2, training__eval_every=None, engine__disk=str(tmp_path))
    short += sets(engine__placement__disk_moments=2)
    folders = [tmp_path / name for name in ("here", "mac")]
    here, mac = (["train", str(run_file), *short, *sets(output__folder=str(f))] for f in folders)
    megatrain.done(*here)
    sizes = ("--host-memory", "512GiB", "--device-memory", "192GiB", "--cores", "32")
    plan = ["plan", str(run_file), "--gpu", "MI300X", *sizes, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MEGATRAIN_HOST_MEMORY", None)
    code = [sys.executable, "-c", ROCM + MAC + LOOK + COMMANDS, json.dumps([mac, plan])]
    done = subprocess.run(
        code, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in folders))
    told = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert told["fits"] is True and told["forecast"]["tokens_per_step"] == 128
