"""What is learnt of a model is kept: plans from it are the same, and need no model."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.cli.models import lora_adapter
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.notes import Notes
from megatrain.forecast.workload import Generation, Workload
from megatrain.optim import Muon
from megatrain.plan.planner import make_plan
from megatrain.source.source import open_source, structure
from tests.sweeps import few
from tests.unit.forecast_cases import experts_config, small_machine, tiny_config

WORKLOAD = Workload(512, 64)


def routed():
    config = experts_config()
    config.output_router_logits = True
    return config


MODELS = {
    "tied": (lambda: tiny_config(2, tied=True), {}),
    "norms with biases": (lambda: GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4), {}),
    "routers": (routed, {}),
    "an adapter on nf4": (lambda: tiny_config(2), {"adapter": lora_adapter(4), "base": "nf4"}),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatrain" / "models"


def planned(config, notes, workload=WORKLOAD):
    machine = small_machine(device_mib=100.0, host_gib=4)
    plan = make_plan(notes.spec(config), machine, workload, notes=notes)
    notes.keep()
    return plan.as_dict()


def unneeded():
    raise AssertionError("the model was opened")


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_a_second_plan_is_the_same_without_the_model(name, folder):
    make, options = MODELS[name]
    config = make()

    def of(workload, known):
        opened = unneeded if known else lambda: structure(open_source(make(), **options))
        return planned(config, Notes(opened, {"name": name}), workload)

    workloads = [WORKLOAD, replace(WORKLOAD, rule=Muon()), replace(WORKLOAD, clip=False)]
    first = [of(workload, known=False) for workload in workloads]
    assert first == [of(workload, known=True) for workload in workloads]
    of(replace(WORKLOAD, tokens_per_step=256), known=True)
    assert [file.stat().st_size > 1000 for file in folder.iterdir()] == [True]


def test_replies_are_kept_as_well():
    workload = replace(WORKLOAD, generation=Generation(16, rows=4, reference=True))
    config = tiny_config(2)
    first = planned(config, Notes(lambda: structure(open_source(config)), {}), workload)
    assert planned(config, Notes(unneeded, {}), workload) == first


def test_a_damaged_or_foreign_file_is_made_anew(folder):
    """Nor does it matter that the folder cannot be written."""
    config = tiny_config(1)

    def measured():
        notes = Notes(lambda: structure(open_source(config)), {"of": "one layer"})
        spec = notes.spec(config)
        work = ForecastCache(spec, notes).measured(WORKLOAD).layer(0, 1)
        notes.keep()
        return work, spec.outputs, [tuple(p.shape) for p in spec.capture.model.parameters()]

    first = measured()
    [file] = folder.iterdir()
    text = file.read_text()
    values = dict.fromkeys(json.loads(text)["values"], "none")
    for spoilt in (
        text[: len(text) // 2],
        text.replace('"torch"', '"other"'),
        json.dumps({**json.loads(text), "values": values}),
    ):
        file.write_text(spoilt)
        assert measured() == first
        assert file.read_text() == text
    shutil.rmtree(folder.parent)
    folder.parent.write_text("a file")
    assert measured() == first


def test_a_plan_of_a_known_model_imports_no_model():
    code = (
        "import sys; import megatrain.cli as cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*{'torch._dynamo', 'transformers.modeling_utils'} & {*sys.modules})"
    )
    asked = "plan --model toy --gpu 4090 --host-memory 64GiB --cores 8 --tokens 4096"
    first = CliRunner().invoke(app, asked)
    assert "transformers.modeling_utils" in sys.modules
    command, root = [sys.executable, "-c", code, *asked.split()], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.returncode, first.exit_code) == (0, 0), done.stderr
    *second, imported = done.stdout.splitlines()
    assert (second, imported) == (first.stdout.splitlines(), "")
