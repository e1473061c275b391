"""The doctor: what it measures, what it says, and that nothing stops it."""

import json
import os
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from megatrain import machine as machine_rates
from megatrain.base.units import GIB, MIB
from megatrain.device import CpuDevice
from megatrain.machine import Machine
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
from megatrain.telemetry.gpu import GpuState
from tests.inside import answering, sized

SMALL = Sizes(
    copy_bytes=1 << 16,
    products={"bf16": ((16, 8, 12, 3), (16, 8, 8, 2)), "fp32": ((16, 16, 16, 1),)},
    attention={"bf16": ((2, 8), (1, 16)), "fp32": ((2, 8),)},
    heads=2,
    head_size=16,
    launches=3,
    load_width=8,
)
GPU = GpuState(
    name="NVIDIA H200",
    driver="580.1",
    pcie_generation=5,
    pcie_lanes=16,
    other_processes=(),
    used_bytes=1 << 30,
)
HEALTHY = Facts(
    cpu="Some CPU",
    cores=16,
    quota_cores=None,
    memory_bytes=128 * GIB,
    allowed_bytes=128 * GIB,
    free_bytes=125 * GIB,
    huge_pages="madvise",
    folder="/data",
    disk_free_bytes=900 * GIB,
    kernels="native (avx512)",
    native_kernels=True,
    compiles=True,
    torch_cuda="13.0",
    gpu=GPU,
)
RATES = {"to_device_pinned_gbps": 55.5}


def found(changed, rates=RATES):
    return [str(finding) for finding in findings(changed, rates)]


def test_nothing_is_wrong_with_a_healthy_machine():
    assert found(HEALTHY) == []


TROUBLES = {
    "quota": ({"quota_cores": 12.5}, {}, "12.5 cores' time for the optimizer's update, 16 cores"),
    "cores": ({"cores": 4}, {}, "4 cores' time for the optimizer"),
    "cgroup": ({"allowed_bytes": 64 * GIB, "free_bytes": 64 * GIB}, {}, "64.0 GiB of the machine"),
    "pages": ({"huge_pages": "never"}, {}, "huge pages are off"),
    "kernels": ({"native_kernels": False}, {}, "several times slower"),
    "disk": ({"disk_free_bytes": 5 * GIB}, {}, "5.0 GiB are free in /data"),
    "compiler": ({"compiles": False}, {}, "no Triton or no C compiler"),
    "others": ({}, {"other_processes": ((77, 3 * GIB),)}, "(77) hold 3.0 GiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_found_alone_and_has_a_remedy(name):
    host, gpu, text = TROUBLES[name]
    changed = replace(HEALTHY, **host, gpu=replace(GPU, **gpu))
    diagnostics = findings(changed, RATES)
    assert sum(text in finding.what for finding in diagnostics) == 1, diagnostics
    assert len(diagnostics) == (2 if name == "generation" else 1), diagnostics
    assert all(finding.remedy and finding.wrong for finding in diagnostics)


def test_a_slow_bus_no_pinning_and_no_gpu_are_found():
    assert "reach 20.0 GB/s of 64" in found(HEALTHY, rates={"to_device_pinned_gbps": 20.0})[0]
    assert "cannot be pinned" in found(HEALTHY, rates={"to_device_pageable_gbps": 10.0})[0]
    assert "without CUDA" in found(replace(HEALTHY, gpu=None, torch_cuda=None))[0]
    assert "the driver shows no GPU" in found(replace(HEALTHY, gpu=None))[0]


class Library:
    """As pynvml, for a GPU that answers little."""

    class NVMLError(Exception):
        pass

    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")

    def __getattr__(self, name):
        def refuse(*arguments):
            raise self.NVMLError("not supported")

        answers = {
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
                SimpleNamespace(pid=1, usedGpuMemory=None),
            ],
        }
        if name == "nvmlDeviceGetCurrPcieLinkGeneration":
            raise AttributeError(name)
        return (lambda handle: answers[name]) if name in answers else refuse


def test_a_driver_may_leave_questions_unanswered(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(gpu, "driver", lambda device: nullcontext((Library(), None)))
    state = gpu.gpu_state("cuda")
    assert (state.name, state.driver) == ("NVIDIA H200", "580.1")
    assert (state.pcie_lanes, state.pcie_generation, state.used_bytes) == (None,) * 3
    assert state.other_processes == ((1, 0),)
    assert found(replace(HEALTHY, gpu=replace(state, other_processes=()))) == []


def test_every_rate_can_be_measured():
    device = CpuDevice()
    measured = bus_measurements(device, 1 << 16) + device_measurements(device, SMALL)
    assert [m for m in measured if m.why_not or not m.value or m.value <= 0] == []
    assert len({m.name for m in measured}) == len(measured) == 2 + 3 + 3 + 2


def test_the_disk_is_left_as_it_was(tmp_path, monkeypatch):
    sized(monkeypatch, doctor, _CHUNK=MIB)
    measured = doctor.disk_measurements(tmp_path, num_bytes=4 * MIB)
    assert [m.name for m in measured if m.value and m.value > 0] == [
        "disk_write_gbps",
        "disk_read_gbps",
        "disk_both_gbps",
    ]
    assert list(tmp_path.iterdir()) == []


class FakeGpu(CpuDevice):
    """Computes on the CPU and says that it is a GPU."""

    kind = "cuda"

    def memory(self):
        return super().memory() | {"device_total_bytes": 100 * GIB, "device_bytes": 0}


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """A machine whose GPU, measurements of the host and cache are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    device = FakeGpu()
    key = machine_rates.Key("GPU-1", "580.1", "CPU", 16)
    answering(monkeypatch, machine_rates, key_of=key)
    answering(monkeypatch, doctor, open_device=device, collect=HEALTHY)
    used = iter(range(1 << 30, 1 << 40, 500 * MIB))
    monkeypatch.setattr(doctor, "gpu_state", lambda name: replace(GPU, used_bytes=next(used)))
    host = {"update_gparams": 4.0, "disk_write_gbps": None, "disk_read_gbps": 2.5,
            "disk_both_gbps": 1.5}  # fmt: skip
    measured = [Measurement(name, name, value, "") for name, value in host.items()]
    answering(monkeypatch, doctor, host_measurements=list(measured))
    return SimpleNamespace(device=device, key=key, folder=tmp_path)


def test_a_diagnosis_is_kept_for_plans(gpu_machine):
    diagnosis = doctor.diagnose("auto", gpu_machine.folder, SMALL)
    assert diagnosis.kept == str(gpu_machine.key.file) and diagnosis.not_kept is None
    for precision in ("bf16", "fp32"):
        machine = machine_rates.read(gpu_machine.key, precision)
        assert machine == diagnosis.machines[precision]
        assert machine.update_gbps == 4.0 * 26 and machine.disk_write_gbps is None
        assert machine.disk_read_gbps == 2.5 and machine.disk_both_gbps == 1.5
        assert machine.device_memory_bytes == 100 * GIB
        assert machine.device_context_bytes == 500 * MIB
        for field in fields(Machine):
            known = getattr(machine, field.name) is not None
            unknown = ("disk_write_gbps", "disk_space_bytes", "link_gbps", "network_gbps")
            assert known or field.name in unknown
    assert json.loads(json.dumps(diagnosis.as_dict()))["facts"]["cpu"] == "Some CPU"


def test_a_machine_that_cannot_pin_is_planned_with_pageable_copies(gpu_machine):
    diagnosis = doctor.diagnose("auto", gpu_machine.folder, SMALL)  # no memory of a CPU is pinned
    values = {m.name: m.value for m in diagnosis.measurements}
    assert diagnosis.machines["bf16"].to_device_gbps == values["to_device_pageable_gbps"]
    assert "cannot be pinned" in diagnosis.findings[0].what
