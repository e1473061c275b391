"""What a user can get wrong: one line, the documented exit code, nothing half-written."""

import shutil
import sys

import pytest
import torch
import yaml

from megatrain import __version__, config
from megatrain.cli import main
from megatrain.device import cpu
from megatrain.telemetry.gpu import Gpu
from megatrain.train import setup
from tests.cli.cases import sets
from tests.inside import answering


def assert_refused(result, expected, code=2):
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("megatrain: error: ")
    assert expected in lines[0]
    assert result.exit_code == code
    assert "Traceback" not in result.stderr


MISTAKES = {
    "misspelt key": (["optimizer.lrr=1"], "optimizer.lrr: unknown key; did you mean 'lr'?"),
    "no layers": (["model.config.num_hidden_layers=0"], "num_hidden_layers: should be a positive"),
    "misspelt field": (["model.config.hiden_size=8"], "hiden_size: unknown field; did you mean"),
    "unknown type": (["model.config.model_type=lama"], "unknown type 'lama'; did you mean 'llama'"),
    "no such tokenizer": (["model.tokenizer=/none/there"], "/none/there: no such folder"),
    "too long": (["data.sequence_length=65"], "65 is longer than the model allows (64"),
    "no such data": (["data.path=none.txt"], "none.txt"),
    "a least rate above the rate": (
        ["schedule.name=cosine_with_min_lr", "schedule.options={min_lr: 0.1}"],
        "learning rate of step 4 0.0231802, above optimizer.lr 0.01; correct schedule.options",
    ),
    "schedule option of another type": (
        ["schedule.name=cosine", "schedule.options={num_cycles: many}"],
        "schedule: cosine cannot be set up: could not convert",
    ),
    "unknown schedule option": (
        ["schedule.name=cosine", "schedule.options={a: 1}"],
        "unexpected keyword argument 'a'; correct schedule.options",
    ),
    "no least rate": (
        ["schedule.name=cosine_with_min_lr"],
        "cannot be set up: One of min_lr or min_lr_rate should be set",
    ),
    "heads that cannot share keys": (
        ["model.config.num_key_value_heads=3"],
        "LlamaForCausalLM cannot be run on text: The size of tensor",
    ),
    "a folder in a file": (["output.folder=/dev/null/run"], "output.folder: /dev/null cannot be"),
    "a folder where none can be": (["output.folder=/proc/none/run"], "/proc/none"),
    "small vocabulary": (["model.config.vocab_size=20"], "20"),
    "not a decoder": (["model.config={model_type: t5}"], "t5"),
    "unknown attention": (["model.attn_implementation=fast"], "fast"),
    "a disk that is not there": (["engine.disk=/none/there"], "disk is '/none/there': no such"),
    "a disk that is a file": (["engine.disk=/etc/passwd"], "disk is '/etc/passwd': not a folder"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_run_file(megatrain, run_file, tmp_path, case):
    overrides, expected = MISTAKES[case]
    options = [part for override in overrides for part in ("--set", override)]
    assert_refused(megatrain("train", run_file, *options), expected)
    assert not (tmp_path / "run").exists()


EARLY = {
    "a device that is not there": (["engine.device=cuda:64"], "device 'cuda:64' was asked for", 2),
    "a schedule": (
        ["schedule={name: warmup_stable_decay, options: {num_decay_steps: 1, decay_type: x}}"],
        "schedule: warmup_stable_decay cannot be set up: Unknown decay type: x",
        2,
    ),
    "a packed base of which all is trained": (
        ["model.base=nf4", "engine.precision=bf16"],
        "base is 'nf4', but no linear module of the layers is frozen; give an adapter",
        2,
    ),
    "labels that are not shifted": (
        [
            "model.config={model_type: bart, d_model: 16, decoder_layers: 2,"
            " decoder_attention_heads: 2}"
        ],
        "the loss of bart compares logits with the labels of the same places",
        2,
    ),
    "a model that mixes packed documents": (
        ["model.config={model_type: bloom, hidden_size: 16, n_layer: 2, n_head: 2}"],
        "bloom does not keep the documents of a packed row (position_ids that start anew) apart",
        2,
    ),
    "a tile that the model has not": (
        ["engine.placement={resident: [nope]}"],
        "placement.resident: the model has no tile 'nope'; it has embedding",
        2,
    ),
    "a limit of a device that has none": (
        ["engine.device_memory=1GiB"],
        "device_memory limits a GPU, but the device is cpu; set host_memory",
        2,
    ),
    "rows shared by more processes than there are": (
        [
            "engine.sequence_parallel=2",
            "data={packing: false, path: a, sequence_length: 8}",
            "training.eval_every=null",
        ],
        "engine.sequence_parallel is 2, and the run has 1 process: set engine.devices to 2",
        2,
    ),
    "a disk without room for what the run writes": (
        ["model.config.hidden_size=262144", "checkpoint={every: 2, keep: 1}"],
        "the model and 2 checkpoints of 4609.7 GiB take 1075",
        3,
    ),
    "a disk without room for the model": (
        ["model.config.hidden_size=262144", "checkpoint={every: null, at_end: false}"],
        "left, and the model and 0 checkpoints of 4609.7 GiB take 1536.6 GiB; free",
        3,
    ),
}


@pytest.mark.parametrize("case", EARLY)
def test_what_can_be_known_before_data_is_read(megatrain, run_file, case):
    overrides, expected, code = EARLY[case]
    options = [part for o in [*overrides, "data.path=none.txt"] for part in ("--set", o)]
    assert_refused(megatrain("train", run_file, *options), expected, code)


def test_a_disk_without_room_for_the_next_checkpoint(megatrain, run_file, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    with (tmp_path / "run" / "checkpoints" / "step-00000006" / "sparse").open("wb") as file:
        file.truncate(8 << 40)
    longer = sets(training__steps=8)
    result = megatrain("train", run_file, "--resume", *longer)
    assert_refused(result, "left, and the next checkpoint takes 8192.0 GiB; free ", code=3)
    none = sets(checkpoint={"every": None, "at_end": False})
    megatrain.done("train", run_file, "--resume", *longer, *none)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_run_that_takes_the_cpu_says_so(megatrain, run_file, caplog, device):
    megatrain("train", run_file, *sets(engine__device=device, data__path="none.txt"))
    assert ("torch sees no GPU here: the run computes on the CPU" in caplog.text) == (
        device == "auto"
    )


DATA = {
    "empty": ("", "empty"),
    "malformed line": ('{"text": "a"}\n{"text": \n', "bad.jsonl:2"),
    "a pointer": ("version https://git-lfs.github.com/spec/v1\noid a\n", "a pointer of Git LFS"),
    "no such field": ('{"words": "a"}\n', "bad.jsonl:1"),
}


@pytest.mark.parametrize("case", DATA)
def test_a_mistake_in_the_data(megatrain, run_file, tmp_path, case):
    content, expected = DATA[case]
    (tmp_path / "bad.jsonl").write_text(content)
    result = megatrain("train", run_file, "--set", f"data.path={tmp_path / 'bad.jsonl'}")
    assert_refused(result, expected)
    assert not (tmp_path / "run").exists()


def test_a_truncated_checkpoint(megatrain, run_file, tmp_path, trained, tokenizer_folder):
    source = tmp_path / "source"
    shutil.copytree(trained[0] / "model", source)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    tree = yaml.safe_load(run_file.read_text()) | {"model": {"path": str(source)}}
    run_file.write_text(yaml.safe_dump(tree))
    assert_refused(megatrain("train", run_file), "model.safetensors")
    assert_refused(megatrain("generate", source, "--prompt", "a"), "model.safetensors")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_never_overwritten(megatrain, run_file, tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert_refused(megatrain("train", run_file), "holds a finished run; choose another folder")


def test_a_folder_with_other_files_is_not_written_into(megatrain, run_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert_refused(megatrain("train", run_file), "is not empty; choose another folder")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_model_larger_than_the_host_does_not_fit(megatrain, run_file, tmp_path, monkeypatch):
    answering(monkeypatch, cpu, host_available_bytes=1 << 12)
    result = megatrain("train", run_file)
    assert_refused(result, "no host memory for weights: ", code=3)
    assert not (tmp_path / "run").exists()
    plan = "; `megatrain plan` with this run file names what would make it fit"
    assert plan in result.stderr

    for gpu in (Gpu("NVIDIA H200", 1, "580"), None):  # without one, `plan` wants its name
        answering(monkeypatch, setup, find_gpu=gpu)
        result = megatrain("train", run_file, "--set", "engine.device=auto")
        assert_refused(result, "no host memory for weights: ", code=3)
        assert (plan in result.stderr) == (gpu is not None)


USAGE = {  # typer's runner calls the program "root"
    "trian": "no such command 'trian'. Did you mean 'train'?; see `root --help`",
    "train": "missing argument 'run'; see `root train --help`",
    "train a b": "got unexpected extra argument",
    "export a": "missing argument 'out'",
    "train a --sett x=1": "no such option: --sett",
    "--debugg train a": "no such option: --debugg",
    "plan --tokens": "option '--tokens' requires an argument",
    "plan --tokens 0": "--tokens: ",
    "plan --tokens many": "got 'many'; see `root plan --help`",
    "export a b --dtype fp16": "--dtype: 'fp16' is not one of 'float32', 'bfloat16', 'float16'",
    "bench step --shape 7b": "in a checkout of MegaTrain's sources, by python -m benchmarks.step",
    "generate m": "give --prompt",
    "generate m --prompt a --precision fp8": "--precision: 'fp8' is not one of 'bf16', 'fp32'",
    f"generate m --prompt a --seed {2**63}": f"--seed: should be less than or equal to {2**63 - 1}",
}


@pytest.mark.parametrize("command", USAGE)
def test_wrong_usage_is_one_line_too(megatrain, command):
    result = megatrain(*command.split())
    assert_refused(result, USAGE[command])
    assert len(result.stderr.splitlines()) == 1 and not result.stdout


def test_a_command_alone_shows_its_help(megatrain):
    result = megatrain()
    assert result.exit_code == 2
    assert "Commands:" in result.output and "error:" not in result.output


def test_export_of_what_is_no_model_and_into_what_is_not_empty(megatrain, tmp_path):
    assert_refused(megatrain("export", tmp_path, "out"), "no finished model there")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert_refused(megatrain("export", tmp_path, tmp_path / "model"), "is not empty")
    assert not (tmp_path / "out").exists()


def test_a_path_that_cannot_be_used_is_bad_input(megatrain, trained, tmp_path):
    assert_refused(megatrain("export", trained[0], "/proc/out"), "/proc/.out.partial: No such file")
    (tmp_path / "page.html").mkdir()
    result = megatrain("report", trained[0], "--output", tmp_path / "page.html")
    assert_refused(result, f"{tmp_path / 'page.html'}: Is a directory")


def test_the_version_can_be_asked_for(megatrain):
    result = megatrain("--version")
    assert (result.exit_code, result.stdout) == (0, f"megatrain {__version__}\n")


def test_debug_adds_the_traceback(megatrain):
    result = megatrain("--debug", "train", "none.yaml")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "megatrain: error: none.yaml" in result.stderr


def test_a_bug_shows_its_traceback_and_ends_with_4(monkeypatch, capsys):
    monkeypatch.setattr(config, "load", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", "x"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert "ZeroDivisionError" in capsys.readouterr().err
