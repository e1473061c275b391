"""Neither a save nor a load, of a checkpoint or a model, holds the model a second time."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, Engine
from megatrain.base.units import MIB
from tests.families.tiny import decoder_sizes

SLACK = 128 * MIB  # a piece for each thread, their stacks, the manifest


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read of Linux")
def test_peaks(tmp_path):
    """A process of its own, whose peak is its own."""
    command = [sys.executable, "-m", "tests.checkpoint.test_memory", str(tmp_path)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    sizes = json.loads(run.stdout.splitlines()[-1])
    assert sizes["planes"] > 4 * SLACK
    assert sizes["saving"] < SLACK
    assert sizes["loading"] < sizes["planes"] + SLACK
    assert sizes["planes"] == pytest.approx(14 * sizes["parameters"], rel=0.005)
    assert sizes["opening"] < sizes["planes"] + SLACK


def measure(folder):
    config = LlamaConfig(**decoder_sizes(8192, 768, 2048, 6, 4))
    engine = Engine(config, optimizer=AdamW(), device="cpu", precision="bf16")
    begin = _peak_from_here()
    engine.save(folder / "saved")
    saving = _status("VmHWM") - begin
    engine.close()
    del engine
    begin = _peak_from_here()
    engine = Engine.load(folder / "saved", device="cpu")
    loading = _status("VmHWM") - begin
    planes, parameters = engine.memory()["host_bytes"], engine.num_parameters
    engine.save_pretrained(folder / "model", dtype=torch.float32)
    engine.close()
    del engine
    begin = _peak_from_here()
    Engine(folder / "model", optimizer=AdamW(), device="cpu")
    sizes = {"saving": saving, "loading": loading, "opening": _status("VmHWM") - begin}
    return sizes | {"planes": planes, "parameters": parameters}


def _peak_from_here():
    """Forget the peak so far; resident bytes now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
