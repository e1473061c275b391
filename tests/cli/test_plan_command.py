"""`megatrain plan`: for people, for programs, and what it refuses."""

import json
import mmap
import re
from unittest import mock

import pytest

from megatrain.base.units import GIB
from megatrain.cli import plan as command
from megatrain.driver.base import Gpu
from megatrain.forecast import op_counter
from megatrain.forecast.measure import Measurer
from megatrain.forecast.workload import Workload
from megatrain.machine import machine_for
from megatrain.train.second_model import Teacher
from tests.cli.cases import MISTAKES, change_run, sets, tiny_llama
from tests.cli.cases import assert_refused as refused
from tests.cli.test_distill import distilling, teacher  # noqa: F401
from tests.inside import answering, sized

HERE = ["--gpu", "4090", "--host-memory", "64GiB", "--cores", 16]


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model" / "config.json"
    (path.parent / "empty").mkdir(parents=True)
    path.write_text(json.dumps(tiny_llama(vocab_size=300)))
    return path


def test_a_run_file_is_planned(megatrain, run_file, tmp_path):
    result = megatrain("plan", run_file, *HERE)
    assert result.exit_code == 0, result.output
    for text in ("run.yaml, 24,512 parameters", "it fits", "layer 0", "at the peak", "binds"):
        assert text in result.stdout
    assert "for 768 tokens" in result.stdout  # 6 steps of 4 rows of 32
    assert not (tmp_path / "run").exists()


def test_without_a_gpu_the_way_to_plan_is_named(megatrain, model_file, monkeypatch):
    answering(monkeypatch, command, find_gpu=None, present_machine=None)
    result = megatrain("plan", "--model", model_file, "--sequence-length", 32)
    refused(result, "name one with --gpu, such as --gpu 4090")


def test_json_for_programs(megatrain, model_file):
    sizes = ["--tokens", 256, "--sequence-length", 32, "--total-tokens", "1e6", "--gpus", 8]
    told = megatrain.planned("--model", model_file, *HERE, *sizes, "--no-clip")
    assert told["fits"] is True and told["total_tokens"] == 1_000_000 and told["clip"] is False
    assert told["several_gpus"]["gpus"] == 8
    assert told["host_memory_bytes"] == 64 * GIB
    assert told["forecast"]["tokens_per_step"] == 256
    assert {tile["name"] for tile in told["tiles"]} >= {"head"}


def test_rows_that_devices_share_are_planned_in_parts(megatrain, run_file):
    """Each of two has all rows of a step, and half of each."""
    shared = ["--set", "engine.sequence_parallel=2"]
    refused(megatrain("plan", run_file, *HERE, *shared), "data.packing")
    shared += ["--set", "data.packing=false"]
    refused(megatrain("plan", run_file, *HERE, *shared), "plan with --gpus 2")
    own = Workload(tokens_per_step=4 * 101, sequence_length=101, micro_batch=3, sequence_ranks=2)
    each = own.shared(2)
    assert (each.sequence_length, each.rows, each.micro_batch) == (51, 4, 3)
    two = ["--set", "engine.devices=2"]
    told = megatrain.planned(run_file, *HERE, *shared, *two)
    assert told["several_gpus"]["gpus"] == 2


def test_the_plan_of_smaller_states_and_masters_counts_their_bytes(megatrain, run_file):
    def planes(kind, *options):
        told = megatrain.planned(run_file, *HERE, "--precision", "bf16", *options)
        return sum(tier[kind] for tier in told["bytes_by_tier"].values())

    by_key = planes("moments", "--set", "optimizer.states=int8")
    assert planes("moments") * 17 / 64 == pytest.approx(by_key, rel=0.01)
    assert planes("moments", "--states", "int8") == by_key
    assert planes("remainder") == 2 * planes("remainder", "--master", "24") > 0
    lion = [*sets(optimizer__name="lion"), "--states", "int8"]
    megatrain.refused("--states: lion has no such choice", "plan", run_file, *HERE, *lion)
    of_16 = ["plan", run_file, *HERE, "--master", "16"]
    megatrain.refused("master is 16; it must be 32 or 24", *of_16)


def test_planes_on_a_disk_are_told_with_its_wear(megatrain, run_file, tmp_path):
    placement = {"slots": 2, "disk_moments": 3}
    there = sets(engine__disk=str(tmp_path), engine__placement=placement)
    text = megatrain.done("plan", run_file, *HERE, *there).stdout
    assert "host, disk" in text and "TB written a day at this speed" in text
    assert "no rate of the disk is measured here" in text
    told = megatrain.planned(run_file, *HERE, *there)
    disk, moments = told["disk"], told["bytes_by_tier"]["disk"]["moments"]
    assert disk["num_bytes"] == disk["written_bytes_a_step"] == moments > 0
    a_day = moments / told["forecast"]["seconds"] * 86400 / 1e12
    assert disk["written_terabytes_a_day"] == pytest.approx(a_day)
    assert "disk " not in megatrain("plan", run_file, *HERE).stdout


def test_a_model_that_does_not_fit_ends_with_3_and_remedies(megatrain, model_file):
    small = ["--gpu", "4090", "--host-memory", "1GiB", "--cores", 16]
    sizes = ["--tokens", 256, "--sequence-length", 32]
    result = megatrain("plan", "--model", model_file.parent, *small, *sizes)
    refused(result, "of host memory are missing", code=3)
    assert "It would fit, the cheapest first:\n1. let it use" in result.stdout
    assert "does not fit" in result.stdout and "1.0 GiB" in result.stdout


def test_one_memory_lacks_one_amount_and_a_machine_with_it_fits(megatrain, model_file):
    asked = ["plan", "--model", model_file, "--gpu", "DGX Spark", "--cores", 16]
    asked += ["--tokens", 256, "--sequence-length", 32, "--memory"]
    for memory in ("2KiB", "1GiB"):
        result = megatrain(*asked, memory)
        refused(result, "of the one memory are missing", code=3)
        (least,) = re.findall(r"take a machine with (\d+) GiB of memory: ", result.stdout)
        assert int(least) in (3, 4) and "let it use" not in result.stdout.split("\n2. ")[0]
    assert megatrain(*asked, f"{least}GiB").exit_code == 0
    megatrain.refused("2 GPUs: GB10 is the only one", *asked, "8GiB", "--gpus", 2)


def test_with_the_settings_of_a_remedy_it_fits(megatrain, run_file):
    here = [*HERE[:2], *HERE[4:], "--set", "engine.host_memory=1GiB"]
    result = megatrain("plan", run_file, *here, "--json")
    assert result.exit_code == 3
    (remedy,) = json.loads(result.stdout)["remedies"]
    assert remedy["settings"] == {"engine.host_memory": "3.0 GiB"}
    settings = [f"{key}={value}" for key, value in remedy["settings"].items()]
    changed = [part for setting in settings for part in ("--set", setting)]
    assert megatrain("plan", run_file, *here, *changed).exit_code == 0


def test_missing_data_is_said_after_the_plan(megatrain, run_file):
    result = megatrain("plan", run_file, *HERE, "--set", "data.path=data/none.jsonl")
    refused(result, "data.path: data/none.jsonl is not there (it would fit; the plan is above)")
    assert "it fits" in result.stdout
    assert command.missing_data("some/hub-set") is None
    assert command.missing_data(["*.yaml", "none/*.txt"]) == "data.path: none/*.txt is not there"


@pytest.mark.parametrize("told", MISTAKES["plan"])
def test_a_mistake(megatrain, model_file, told):
    arguments = MISTAKES["plan"][told]
    given = {"--gpu", "--host-memory"} & set(map(str, arguments))
    rest = HERE if not given else HERE[2:] if "--gpu" in given else [*HERE[:2], *HERE[4:]]
    refused(megatrain("plan", *arguments, *rest), told)


def test_a_configuration_that_cannot_be_is_told_with_the_reason(megatrain, model_file):
    """transformers says on the second line what is wrong."""
    config = json.loads(model_file.read_text())
    model_file.write_text(json.dumps(config | {"hidden_size": "64"}))
    result = megatrain("plan", "--model", model_file.parent, *HERE)
    refused(result, "'hidden_size': TypeError: Field 'hidden_size' expected int, got str")


def test_what_other_processes_hold_is_left_to_them(megatrain, model_file, monkeypatch):
    machine = machine_for("4090", 64 * GIB, 16)
    gpu = Gpu("NVIDIA H200", 1, "580", used_bytes=20 * GIB, other_processes=((77, 19 * GIB),))
    answering(monkeypatch, command, find_gpu=gpu, present_machine=machine)
    sizes = ["--tokens", 64, "--sequence-length", 32]
    told = megatrain.planned("--model", model_file, *sizes)
    assert told["device_memory_bytes"] == machine.device_memory_bytes - 20 * GIB
    assert "other processes (77) hold 20.0 GiB" in told["warnings"][0]
    limited = megatrain.planned("--model", model_file, *sizes, "--device-memory", "10GiB")
    assert limited["device_memory_bytes"] == 10 * GIB


def test_a_placement_of_the_run_file_is_planned(megatrain, run_file):
    place = {"slots": 2, "layer_inputs": "host"}
    change_run(run_file, engine__device_memory="9GiB", engine__placement=place)
    told = megatrain.planned(run_file, *HERE)
    assert told["forecast"]["placement"]["layer_inputs"] == "host"
    assert told["device_memory_bytes"] == 9 * GIB
    assert told["forecast"]["micro_batch"] == 2 and told["precision"] == "fp32"


def test_attention_is_planned_as_the_run_has_it(megatrain, run_file):
    lengths = ["--set", "model.config.max_position_embeddings=2048", "--sequence-length", 2048]
    fixed = [run_file, *HERE, *lengths, "--tokens", 2048, "--micro-batch", 1]
    fixed += ["--set", "engine.placement={slots: 2}", "--set"]
    usual, eager = (
        megatrain.planned(*fixed, f"model.attn_implementation={name}")["forecast"]["device_bytes"]
        for name in ("sdpa", "eager")
    )
    scores = 2 * 2048 * 2048 * 4  # of two heads
    assert eager["working set"] > usual["working set"] + scores


def test_quantised_weights_are_told(megatrain, run_file, model_file):
    config, sizes = json.loads(model_file.read_text()), ["--tokens", 256, "--sequence-length", 32]
    ask = ["--model", model_file.parent, *HERE, *sizes]
    model_file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert "are unpacked from mxfp4" in megatrain.done("plan", *ask).stdout
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2}
    wide |= {"quantization_config": {"quant_method": "fp8"}}
    model_file.write_text(json.dumps(config | wide))
    of_layers = {}
    for base in ("folder", "bf16"):
        adapter = ["--lora-r", 4, "--base", base]
        told = megatrain.planned(*ask, *adapter)
        assert ("are unpacked" in str(told["warnings"])) == (base == "bf16")
        layers = (tile for tile in told["tiles"] if "layer" in tile["name"])
        of_layers[base] = sum(tile["total_bytes"] for tile in layers)
    assert of_layers["folder"] < 0.6 * of_layers["bf16"]
    model_file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert "are quantised, and such are not trained" in megatrain.done("plan", *ask).stdout
    change_run(run_file, model__path=str(model_file.parent), model__config=None)
    refused(megatrain("plan", run_file, *HERE), "take the unquantised model (it would fit")


@pytest.mark.parametrize(
    ("where", "reason"), [("count", "more than 5 operations"), ("deep", "one after the other")]
)
def test_a_model_that_cannot_be_followed_cannot_be_planned(
    megatrain, model_file, monkeypatch, where, reason
):
    """A recurrence step by step, as Mamba's without its kernels: torch's calls go too deep."""
    too_deep = mock.Mock(side_effect=RecursionError("maximum recursion depth exceeded"))
    if where == "count":
        sized(monkeypatch, op_counter, MOST_OPERATIONS=5)
    else:
        sized(monkeypatch, Measurer, _call=too_deep)
    result = megatrain("plan", "--model", model_file, "--sequence-length", 32, *HERE)
    refused(result, "cannot be planned: ")
    assert reason in result.stderr and "train streams all of it" in result.stderr


def test_an_adapter_of_a_run_file_is_written_there(megatrain, run_file):
    result = megatrain("plan", run_file, *HERE, "--lora-r", 8, "--base", "fp8")
    refused(result, "add --set adapter.r=8 --set adapter.target_modules=all-linear")
    assert "--set model.base=fp8" in result.stderr
    result = megatrain("plan", "--model", "0.5B", *HERE, "--base", "nf4")
    refused(result, "--base nf4 is of frozen layers; add --lora-r 16")


def test_a_run_on_the_cpu_is_planned_for_a_gpu_alone(megatrain, run_file):
    refused(megatrain("plan", run_file), "engine.device is cpu, and plans are for GPUs; name one")
    assert megatrain("plan", run_file, *HERE).exit_code == 0  # as if it ran on that GPU


@pytest.mark.exhaustive
def test_a_streamed_teacher_is_counted(megatrain, distilling, tmp_path):  # noqa: F811
    """As a run that has one takes it, while a step asks it."""
    file, found, asked = distilling(), [], Teacher.with_answers

    def noted(self, *step, **data):
        answers = asked(self, *step, **data)
        found.append(self.engine.memory()["host_bytes"])
        return answers

    def forecast(*options):
        return megatrain.planned(file, "--gpu", "4090", *options)["forecast"]

    plain, told = forecast("--set", "loss={name: sft}"), forecast()
    with mock.patch.object(Teacher, "with_answers", noted):
        run = sets(output__folder=str(tmp_path / "run"), training__steps=2)
        megatrain.done("train", file, *run)
    held = told["host_bytes"]["host_teacher_bytes"]
    # Pages are whole, and a plan's rows of the embedding are as many as tokens of a step.
    room = 4 * 48 * told["tokens_per_step"] + 2 * mmap.PAGESIZE
    assert found[-1] <= held <= found[-1] + room
    assert told["host_peak_bytes"] - plain["host_peak_bytes"] == held
    assert told["device_bytes"]["teacher"] > 0
