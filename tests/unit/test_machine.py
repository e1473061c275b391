"""Machines: what is listed, what the doctor measures and says, which file is believed."""

import json
import os
import sys
import time
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from unittest import mock

import pynvml
import pytest
import torch

from megatrain import InputError
from megatrain import machine as rates
from megatrain.base.units import GIB, MIB
from megatrain.device import CpuDevice
from megatrain.device.base import Abilities
from megatrain.driver.base import Gpu
from megatrain.machine import Machine, machine_for, present_machine
from megatrain.plan import doctor
from megatrain.plan.doctor import (
    Facts,
    Measurement,
    Sizes,
    bus_measurements,
    device_measurements,
    findings,
)
from megatrain.telemetry import gpu
from megatrain.telemetry.gpu import known_gpus, named_gpu
from tests.inside import answering, sized
from tests.refusals import table

KEY = rates.Key("GPU-1234", "580.1", "Some CPU", 16)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(**changes):
    machine = machine_for("H200", 125 * GIB, 16)
    return replace(machine, name="here", measured=True, matmul_tflops=700.0, **changes)


def test_every_listed_gpu_is_found_by_its_name_and_has_sensible_figures():
    for each in known_gpus():
        assert named_gpu(each.name).name == each.name
        assert named_gpu(each.name.replace(" ", "").lower()).name == each.name
        assert 10 <= each.memory_gib <= 512 and each.fp32_tflops <= each.bf16_tflops < 3000
        assert 16 <= each.bus_gbps <= 500 and 200 <= each.memory_gbps <= 9000
        assert each.source.startswith("https://")
        assert ("NVLink" in each.source.replace("NVLink-C2C", "")) == (each.link_gbps > 0)
        assert each.host in ("desktop", "workstation", "server")
    assert len({gpu.words for gpu in known_gpus()}) == len(known_gpus())


NAMES = table(__file__, "settings.yaml")


@pytest.mark.parametrize("name", NAMES["GPUs"])
def test_a_gpu_goes_by_many_names(name):
    assert named_gpu(NAMES["GPUs"][name]).name == name


@pytest.mark.parametrize("text", NAMES["unknown GPUs"])
def test_an_unknown_gpu_is_answered_with_the_nearest(text):
    with pytest.raises(InputError, match="unknown GPU") as error:
        named_gpu(text)
    assert NAMES["unknown GPUs"][text] in str(error.value)


def test_memory_that_is_shared_is_one_size_less_what_the_system_keeps():
    """Nearly all of it is the device's, as tiles rest there; the process has the rest."""
    spark = machine_for("GB10", 1 << 60, 20)
    in_all = spark.device_memory_bytes + spark.host_memory_bytes
    assert in_all == int(0.95 * 128 * GIB) and spark.host_memory_bytes == in_all // 16
    mac = machine_for("M4 Max", 8 * GIB, 12, 64 * GIB)
    assert mac.device_memory_bytes + mac.host_memory_bytes == 48 * GIB
    assert 2 * spark.to_device_gbps < 273
    both = [split.device_memory_bytes + split.host_memory_bytes for split in spark.splits()]
    assert both == [in_all] * 3 and spark.splits()[0] == spark
    assert (h200 := machine_for("H200", 125 * GIB, 16)).splits() == [h200]


def test_the_listed_h200_is_near_the_measured_one():
    machine = machine_for("H200", 125 * GIB, 16)
    assert machine.matmul_tflops == pytest.approx(705, rel=0.1)
    assert machine.to_device_gbps == pytest.approx(55.5, rel=0.02)
    assert machine.update_gbps == pytest.approx(4.56 * 26, rel=0.02) and not machine.measured


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
    "zero": lambda r: r["machines"]["bf16"].update(update_gbps=0),
    "nan": lambda r: r["machines"]["bf16"].update(to_device_gbps=float("nan")),
    "text": lambda r: r["machines"]["bf16"].update(cores="many"),
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
    rates.write(KEY, {"bf16": measured(link_gbps=None)})  # nobody measures it beforehand
    assert present_machine() == replace(measured(), host_memory_bytes=77 * GIB)
    assert present_machine(precision="fp32").measured is False
    answering(monkeypatch, rates, find_gpu=replace(gpu, name="Tesla T4"))
    rates.key_of("cuda").file.unlink()
    assert present_machine() is None
    answering(monkeypatch, rates, find_gpu=None)
    assert present_machine() is None


# The doctor: what it measures, what it says, and that nothing stops it.

SMALL = Sizes(
    copy_bytes=1 << 16,
    products={"bf16": ((16, 8, 12, 3), (16, 8, 8, 2)), "fp32": ((16, 16, 16, 1),)},
    attention={"bf16": ((2, 8), (1, 16)), "fp32": ((2, 8),)},
    heads=2,
    head_size=16,
    launches=3,
)
GPU = Gpu("NVIDIA H200", 140 * GIB, "580.1", "", 5, 16, used_bytes=1 << 30)
HEALTHY = Facts(
    cpu="Some CPU", cores=16, quota_cores=None, memory_bytes=128 * GIB, allowed_bytes=128 * GIB,
    free_bytes=125 * GIB, huge_pages="madvise", folder="/data", disk_free_bytes=900 * GIB,
    kernels="native (avx512)", native_kernels=True, compiles=True, torch_cuda="13.0", gpu=GPU,
)  # fmt: skip
RATES = {"to_device_pinned_gbps": 55.5}
OTHERS = replace(GPU, other_processes=((77, 3 * GIB),))
# What is otherwise than on a healthy machine, its rates, and what is said of it.
TROUBLES = {
    "quota": ({"quota_cores": 12.5}, RATES, "update has the time of 12.5 cores; 16 are"),
    "cores": ({"cores": 4}, RATES, "update has only 4 cores"),
    "cgroup": ({"allowed_bytes": 64 * GIB, "free_bytes": 64 * GIB}, RATES, "64.0 GiB of the mach"),
    "pages": ({"huge_pages": "never"}, RATES, "huge pages are off"),
    "kernels": ({"native_kernels": False}, RATES, "several times slower"),
    "disk": ({"disk_free_bytes": 5 * GIB}, RATES, "5.0 GiB are free in /data"),
    "compiler": ({"compiles": False}, RATES, "no Triton or no C compiler"),
    "others": ({"gpu": OTHERS}, RATES, "(77) hold 3.0 GiB"),
    "bus": ({}, {"to_device_pinned_gbps": 20.0}, "reach 20.0 GB/s of 64"),
    "pinning": ({}, {"to_device_pageable_gbps": 10.0}, "cannot be pinned"),
    "CUDA": ({"gpu": None, "torch_cuda": None}, RATES, "without CUDA"),
    "driver": ({"gpu": None}, RATES, "the driver shows no GPU"),
    "untested": ({"untested": "AMD's GPUs"}, RATES, "MegaTrain is untested on AMD's GPUs"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_found_alone_and_has_a_remedy(name):
    changes, measured, text = TROUBLES[name]
    assert not findings(HEALTHY, RATES)
    first, *others = findings(replace(HEALTHY, **changes), measured)
    assert text in first.what and first.remedy and not others
    assert first.wrong == (changes.get("gpu", GPU) is not None and name != "untested")


def test_a_build_for_rocm_is_not_asked_for_cuda(monkeypatch):
    sized(monkeypatch, torch.version, hip="7.0")
    (found,) = findings(replace(HEALTHY, gpu=None, torch_cuda=None), RATES)
    assert "the driver shows no GPU" in found.what and "rocm-smi" in found.remedy


@pytest.mark.parametrize(
    ("name", "hip", "untested"),
    [
        ("NVIDIA GB10", None, "a GPU that shares the host's memory"),
        ("AMD Instinct MI300X", "7.0", "AMD's GPUs"),
        ("NVIDIA H200", None, None),
    ],
)
def test_what_is_untested_is_known(name, hip, untested, monkeypatch, tmp_path):
    answering(monkeypatch, doctor, find_gpu=replace(GPU, name=name))
    sized(monkeypatch, torch.version, hip=hip)
    assert doctor.collect("cuda", tmp_path).untested == untested


def test_a_driver_may_leave_questions_unanswered(monkeypatch):
    refusing = type("NVMLError", (Exception,), {})
    known = {*dir(pynvml)} - {"nvmlDeviceGetCurrPcieLinkGeneration"}  # of later versions
    library = mock.Mock(NVMLError=refusing, spec_set=[*known])
    for name in dir(library):
        if name.startswith("nvmlDeviceGet"):
            getattr(library, name).side_effect = refusing("not supported")
    running = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
               SimpleNamespace(pid=1, usedGpuMemory=None)]  # fmt: skip
    answers = {
        "nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetHandleByUUID": 0,
        "nvmlSystemGetDriverVersion": "580.1", "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetMaxPcieLinkWidth": 16, "nvmlDeviceGetComputeRunningProcesses": running,
    }  # fmt: skip
    for name, answer in answers.items():
        getattr(library, name).configure_mock(side_effect=None, return_value=answer)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    state = gpu.find_gpu("cuda")
    assert (state.name, state.driver) == ("NVIDIA H200", "580.1")
    assert (state.pcie_lanes, state.pcie_generation, state.used_bytes) == (None,) * 3
    assert state.other_processes == ((1, 0),)
    assert not findings(replace(HEALTHY, gpu=replace(state, other_processes=())), RATES)


def test_every_rate_can_be_measured():
    device = CpuDevice()
    measured = bus_measurements(device, 1 << 16) + device_measurements(device, SMALL)
    assert [m for m in measured if m.why_not or not m.value or m.value <= 0] == []
    assert len({m.name for m in measured}) == len(measured) == 2 + 3 + 3 + 2


def test_the_disk_is_left_as_it_was(tmp_path, monkeypatch):
    sized(monkeypatch, doctor, _CHUNK_BYTES=MIB)
    measured = doctor.disk_measurements(tmp_path, num_bytes=4 * MIB)
    names = [f"disk_{verb}_gbps" for verb in ("write", "read", "both")]
    assert [m.name for m in measured if m.value and m.value > 0] == names
    assert list(tmp_path.iterdir()) == []


class FakeGpu(CpuDevice):
    """Computes on the CPU and says that it has memory of its own."""

    can = Abilities(counts_memory=True)

    def memory(self):
        return super().memory() | {"device_total_bytes": 100 * GIB, "device_bytes": 0}


@pytest.fixture
def gpu_machine(monkeypatch):
    """A machine whose GPU, measurements of the host and cache are the test's own."""
    answering(monkeypatch, rates, key_of=KEY)
    answering(monkeypatch, doctor, open_device=FakeGpu(), collect=HEALTHY)
    used = iter(range(1 << 30, 1 << 40, 500 * MIB))
    monkeypatch.setattr(doctor, "find_gpu", lambda name: replace(GPU, used_bytes=next(used)))
    host = {"update_gparams": 4.0, "disk_write_gbps": None, "disk_read_gbps": 2.5,
            "disk_both_gbps": 1.5}  # fmt: skip
    measured = [Measurement(name, name, value, "") for name, value in host.items()]
    answering(monkeypatch, doctor, host_measurements=list(measured))


@pytest.mark.usefixtures("gpu_machine")
def test_a_diagnosis_is_kept_for_plans(tmp_path):
    """Where nothing can be pinned, as no memory of a CPU can, with the rates of other copies."""
    diagnosis = doctor.diagnose("auto", tmp_path, SMALL)
    assert diagnosis.kept == str(KEY.file) and diagnosis.not_kept is None
    for precision in ("bf16", "fp32"):
        machine = rates.read(KEY, precision)
        assert machine == diagnosis.machines[precision]
        assert machine.update_gbps == 4.0 * 26 and machine.disk_write_gbps is None
        assert machine.disk_read_gbps == 2.5 and machine.disk_both_gbps == 1.5
        assert machine.device_memory_bytes == 100 * GIB
        assert machine.device_context_bytes == 500 * MIB
        for field in fields(Machine):
            known = getattr(machine, field.name) is not None
            unknown = ("disk_write_gbps", "disk_space_bytes", "link_gbps", "network_gbps")
            assert known or field.name in unknown
    assert json.loads(json.dumps(asdict(diagnosis)))["facts"]["cpu"] == "Some CPU"
    values = {m.name: m.value for m in diagnosis.measurements}
    assert diagnosis.machines["bf16"].to_device_gbps == values["to_device_pageable_gbps"]
    assert "cannot be pinned" in diagnosis.findings[0].what
