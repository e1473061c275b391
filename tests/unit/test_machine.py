"""Machines: what is listed, what was measured, and which file is believed."""

import json
import time
from dataclasses import replace

import pytest

from megatrain import machine as rates
from megatrain.base.units import GIB
from megatrain.errors import InputError
from megatrain.machine import machine_for, present_machine
from megatrain.telemetry.gpu import Gpu, by_driver_name, known_gpus, named_gpu
from tests.inside import answering

KEY = rates.Key("GPU-1234", "580.1", "Some CPU", 16)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(**changes):
    machine = machine_for("H200", 125 * GIB, 16)
    return replace(machine, name="here", measured=True, matmul_tflops=700.0, **changes)


def test_every_listed_gpu_is_found_by_its_name_and_has_sensible_figures():
    for gpu in known_gpus():
        assert named_gpu(gpu.name).name == gpu.name
        assert named_gpu(gpu.name.replace(" ", "").lower()).name == gpu.name
        assert 10 <= gpu.memory_gib <= 300 and gpu.fp32_tflops < gpu.bf16_tflops < 3000
        assert 16 <= gpu.bus_gbps <= 500 and 200 <= gpu.memory_gbps <= 9000
        assert gpu.source.startswith("https://") and gpu.host in (
            "desktop",
            "workstation",
            "server",
        )
    assert len({gpu.words for gpu in known_gpus()}) == len(known_gpus())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("3080ti", "RTX 3080 Ti"),
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("B200 192 GB", "B200"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_a_gpu_goes_by_many_names(text, name):
    assert named_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("A100", "did you mean A100 40GB or A100 80GB?"),
        ("RTX 4099", "did you mean RTX 4090 or"),
        ("h1000", "H100"),
        ("TPU", "known are B300, "),
        ("", "known are "),
        ("rtx", "known are "),
    ],
)
def test_an_unknown_gpu_is_answered_with_the_nearest(text, hint):
    with pytest.raises(InputError, match="unknown GPU") as error:
        named_gpu(text)
    assert hint in str(error.value)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3060 Ti", "4090 ti", "RTX 5080 SUPER"])
def test_a_ti_is_another_gpu(name):
    assert by_driver_name(name) is None
    with pytest.raises(InputError, match="did you mean"):
        named_gpu(name)


def test_the_listed_h200_is_near_the_measured_one():
    machine = machine_for("H200", 125 * GIB, 16)
    assert machine.matmul_tflops == pytest.approx(705, rel=0.1)
    assert machine.to_device_gbps == pytest.approx(55.5, rel=0.02)
    assert machine.update_gbps == pytest.approx(4.56 * 26, rel=0.02)
    assert not machine.measured
    assert machine_for("H200", 1, 1, 7).device_memory_bytes == 7
    assert machine_for("H200", 1, 1, precision="fp32").matmul_tflops < 60


def test_what_was_measured_is_read_again():
    path = rates.write(KEY, {"bf16": measured()})
    assert rates.read(KEY, "bf16") == measured()
    assert rates.read(KEY, "fp32") is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    for other in ({"gpu": "GPU-2"}, {"driver": "590"}, {"cpu": "B"}, {"cores": 8}):
        assert rates.read(replace(KEY, **other), "bf16") is None


def spoiled(change):
    path = rates.write(KEY, {"bf16": measured()})
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


SPOILS = {
    "version": lambda r: r.update(version=0),
    "key": lambda r: r["key"].update(gpu="GPU-2"),
    "old": lambda r: r.update(time=time.time() - 400 * 24 * 3600),
    "future": lambda r: r.update(time=time.time() + 1e6),
    "time": lambda r: r.update(time="now"),
    "negative": lambda r: r["machines"]["bf16"].update(matmul_tflops=-1),
    "zero": lambda r: r["machines"]["bf16"].update(update_gbps=0),
    "infinite": lambda r: r["machines"]["bf16"].update(to_device_gbps=float("inf")),
    "nan": lambda r: r["machines"]["bf16"].update(to_device_gbps=float("nan")),
    "text": lambda r: r["machines"]["bf16"].update(cores="many"),
    "truth": lambda r: r["machines"]["bf16"].update(cores=True),
    "fraction": lambda r: r["machines"]["bf16"].update(device_memory_bytes=1.5),
    "guessed": lambda r: r["machines"]["bf16"].update(measured=False),
    "missing": lambda r: r["machines"]["bf16"].pop("cores"),
    "more": lambda r: r["machines"]["bf16"].update(extra=1),
    "list": lambda r: r.update(machines=[]),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_spoilt_file_is_as_good_as_none(name):
    spoiled(lambda record: None)
    assert rates.read(KEY, "bf16") is not None
    spoiled(SPOILS[name])
    assert rates.read(KEY, "bf16") is None


def test_the_present_machine_is_measured_before_listed_before_none(monkeypatch):
    gpu = Gpu("NVIDIA H200", 140 * GIB, "580.1")
    answering(monkeypatch, rates, find_gpu=gpu, key_of=KEY)
    answering(monkeypatch, rates, host_limit_bytes=77 * GIB)
    listed = present_machine()
    assert (listed.measured, listed.host_memory_bytes) == (False, 77 * GIB)
    rates.write(KEY, {"bf16": measured()})
    assert present_machine() == replace(measured(), host_memory_bytes=77 * GIB)
    assert present_machine(precision="fp32").measured is False
    answering(monkeypatch, rates, find_gpu=replace(gpu, name="Tesla T4"))
    rates.key_of("cuda").file.unlink()
    assert present_machine() is None
    answering(monkeypatch, rates, find_gpu=None)
    assert present_machine() is None
