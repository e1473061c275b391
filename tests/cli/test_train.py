"""A whole run on the CPU: what it writes, that it learns, and how it stops."""

import json
import math
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import AdamW, Placement
from megatrain.config import DataSection, load
from megatrain.loss import LabelSmoothing
from megatrain.model.trained import Trained
from megatrain.train import resolve, second_model, setup
from tests.cli.cases import MISTAKES, records, sets


def test_a_run_leaves_all_it_promises(trained):
    folder, result = trained
    names = {path.name for path in folder.iterdir()}
    pictures = {"loss.png", "timeline.png"}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "timeline.json", "finished.json"}
    assert names == {*files, *pictures, "report.html", "checkpoints", "model", ".lock"}
    assert "Finished" in (folder / "report.html").read_text()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "environment.json").read_text())
    assert record["trained_parameters"] == record["parameters"] > 0
    assert record["packages"]["torch"]
    assert (record["devices"], record["ranks"], record["hosts"]) == (["cpu"], 1, 1)
    assert record["placement"]["slots"] == 0  # a CPU reads the planes themselves
    assert "6 steps done" in result.stdout
    assert "step 6/6" in result.stdout


def test_metrics_hold_every_step_and_every_evaluation(trained):
    folder, _ = trained
    steps = records(folder, "loss")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records(folder, "eval_loss")] == [3, 6]
    # Linear schedule: two steps of warm-up from 0 to 0.01, then down to 0 after the last one.
    assert [record["lr"] for record in steps] == pytest.approx(
        [0, 0.005, 0.01, 0.0075, 0.005, 0.0025]
    )
    assert [record["step"] for record in steps if "busy" in record] == [6]  # on the timeline
    for record in steps:
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0
        assert record["tokens"] == 4 * 32
        assert record["host_bytes"] > 0
        assert record["mfu"] is None
        rate = record["tokens"] / record["seconds"]
        assert record["tokens_per_second"] == pytest.approx(rate, rel=1e-3)


def test_labels_are_smoothed_in_steps_but_not_in_evaluations(megatrain, run_file, tmp_path):
    options = {"optimizer__lr": 1e-12, "training__steps": 1, "training__eval_every": 1}
    found = []
    for share in (0.0, 0.5):
        smooth = {"loss__label_smoothing": share, "output__folder": f"run{share}"}
        megatrain.done("train", run_file, *sets(**options, **smooth))
        found.append(records(tmp_path / f"run{share}"))
    (plain, evaluated), (smoothed, evaluated_again) = found
    assert smoothed["loss"] != plain["loss"]
    assert evaluated_again["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-6)


def weights(folder):
    """What is in the file, where `from_pretrained` would cast to the configuration's dtype."""
    return load_file(folder / "model.safetensors")


def test_epochs_are_passes_over_all_rows_and_nothing_need_be_evaluated(
    megatrain, run_file, tmp_path
):
    none = {"data__eval_fraction": 0, "training__eval_every": None}
    megatrain.done("train", run_file, *sets(training__steps=None, training__epochs=2, **none))
    log = records(tmp_path / "run")
    assert [record["step"] for record in log] == [*range(1, 20)]  # 38 rows, 4 a step, twice
    assert log[0]["epoch"] == pytest.approx(2 / 19, abs=1e-4) and log[-1]["epoch"] == 2


def test_export_casts_and_generate_reads_a_run(megatrain, trained, tmp_path):
    folder, _ = trained
    out = tmp_path / "exported"
    megatrain.done("export", folder, out, "--dtype", "bfloat16")
    before, after = weights(folder / "model"), weights(out)
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(out).dtype == torch.bfloat16
    AutoModelForCausalLM.from_pretrained(out)
    options = ["--prompt", "the cat", "--max-new-tokens", "5", "--device", "cpu"]
    texts = [
        megatrain("generate", path, *options, "--precision", "fp32", "--temperature", "0")
        for path in (folder, folder / "model")
    ]
    assert texts[0].exit_code == 0, texts[0].output
    assert texts[0].stdout.startswith("the cat")
    assert texts[0].stdout == texts[1].stdout


# Keys of run files that the engine, the rows or a second model get as they are, and what they get.
CHANGED = [
    "training={steps: 6, batch_size: 6, micro_batch_size: 3, max_grad_norm: 0.3, seed: 7}",
    "engine={device: cpu, verify: step, host_memory: 9GiB, precision: bf16, placement: {slots: 3}}",
    "model.freeze=[norm]", "model.attn_implementation=eager", "model.trust_remote_code=true",
    "optimizer.weight_decay=0.7", "loss.label_smoothing=0.2",
]  # fmt: skip
FOR_ENGINE = {
    "max_grad_norm": 0.3, "seed": 7, "tokens_per_step": 6 * 32, "micro_batch": 3, "verify": "step",
    "host_memory": 9 << 30, "precision": "bf16", "placement": Placement(slots=3),
    "trained": Trained(["norm"]), "attn_implementation": "eager", "trust_remote_code": True,
    "optimizer": AdamW(lr=0.01, weight_decay=0.7), "loss": LabelSmoothing(0.2),
}  # fmt: skip
OF_SECOND = ("precision", "host_memory", "trust_remote_code", "attn_implementation", "seed")
FOR_DATA = {
    "kind": "chat", "sequence_length": 24, "packing": False, "fields": {"text": "body"},
    "bad_rows": "skip", "overlong": "drop", "hub_config": "one", "hub_split": "test",
    "cache_dir": "kept", "path": ["a", "b"], "weights": [1, 3], "repeat": True, "eval_path": "c",
}  # fmt: skip


def test_each_key_of_a_run_file_reaches_whom_it_is_for(run_file, monkeypatch):
    engine, loader = mock.Mock(side_effect=InterruptedError), mock.Mock(wraps=setup.StepLoader)
    monkeypatch.setattr(setup, "StepLoader", loader)
    monkeypatch.setattr(setup, "Engine", engine)
    monkeypatch.setattr(second_model, "Engine", engine)
    assert FOR_DATA.keys() == DataSection.model_fields.keys() - {"eval_fraction"}
    of_data = [f"data.{key}={json.dumps(value)}" for key, value in FOR_DATA.items()]
    config = load(run_file, [*CHANGED, *of_data, "data.eval_fraction=0"])
    model = SimpleNamespace(for_engine="", tokenizer="tokenizer", images=None)
    model.text_config = SimpleNamespace(vocab_size=9)
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "open_dataset", lambda path, **options: {"path": path} | options)
        training, evaluation = resolve.open_data(config, model)
    wanted = {name: value for name, value in FOR_DATA.items() if name != "eval_path"}
    wanted |= {"seed": 7, "vocab_size": 9, "tokenizer": "tokenizer"}
    assert {name: training[name] for name in wanted} == wanted
    del wanted["weights"], wanted["repeat"]
    assert {name: evaluation[""][name] for name in wanted} == wanted | {"path": "c"}
    with pytest.raises(InterruptedError):
        setup.prepare(load(run_file, CHANGED), ExitStack())
    assert {name: engine.call_args.kwargs[name] for name in FOR_ENGINE} == FOR_ENGINE
    assert (loader.call_args.kwargs["seed"], loader.call_args.kwargs["rows_per_step"]) == (7, 6)
    with pytest.raises(InterruptedError):
        second_model.open_reference(config, model)
    wanted = {name: FOR_ENGINE[name] for name in OF_SECOND} | {"host_memory": "9GiB"}
    assert {name: engine.call_args.kwargs[name] for name in wanted} == wanted


# Which parameters a run trains.


@pytest.mark.parametrize("told", MISTAKES["frozen"])
def test_choices_that_cannot_be_made_are_refused(megatrain, run_file, told):
    megatrain.refused(told, "train", run_file, *sets(**MISTAKES["frozen"][told]))
