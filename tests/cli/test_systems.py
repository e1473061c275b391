"""The command on systems that lack what Linux has: a Mac, with torch for ROCm."""

import importlib
import json
import os
import sys
from contextlib import redirect_stdout

import pytest
from safetensors.torch import load_file

from tests.cli.cases import sets
from tests.forks import forked
from tests.parity.cases import same
from tests.refusals import table

MAC, ROCM, LOOK = map(table(__file__, "planted.yaml").get, ("mac", "rocm", "look"))


def test_runs_and_plans_need_nothing_of_linux_and_no_torch_for_cuda(run_file, tmp_path, megatrain):
    """In a fork that imports the package anew. The model is that of a run with all of Linux."""
    short = sets(training__steps=2, training__eval_every=None, engine__disk=str(tmp_path))
    short += sets(engine__placement__disk_moments=2)
    folders = [tmp_path / name for name in ("here", "mac")]
    here, mac = (["train", str(run_file), *short, *sets(output__folder=str(f))] for f in folders)
    megatrain.done(*here)
    sizes = ("--host-memory", "512GiB", "--device-memory", "192GiB", "--cores", "32")
    plan = ["plan", str(run_file), "--gpu", "MI300X", *sizes, "--json"]

    def work():
        for name in [name for name in sys.modules if name.split(".")[0] == "megatrain"]:
            del sys.modules[name]
        del os.environ["MEGATRAIN_HOST_MEMORY"]
        exec(ROCM + MAC + LOOK, {})
        for command in (mac, plan):
            sys.argv, main = ["megatrain", *command], importlib.import_module("megatrain.cli").main
            output = (tmp_path / command[0]).open("w")
            with output as file, redirect_stdout(file), pytest.raises(SystemExit) as end:
                main()
            assert not end.value.code, end.value.code

    assert forked(work) == 0
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in folders))
    told = json.loads((tmp_path / "plan").read_text())
    assert told["fits"] is True and told["forecast"]["tokens_per_step"] == 128
