"""Metrics that survive a full disk, progress lines, and what is known about machines."""

import io
import json
import logging
import os
import subprocess
import sys

import psutil
import pytest
from rich.console import Console

from megatrain.base.units import GIB, MIB
from megatrain.errors import InputError
from megatrain.telemetry import host
from megatrain.telemetry.console import PASSING, Share, StderrHandler, TrainingProgress
from megatrain.telemetry.gpu import bf16_peak_tflops
from megatrain.telemetry.host import environment
from megatrain.telemetry.metrics import MetricsWriter, read_metrics
from tests.inside import sized

RECORD = {
    "step": 1,
    "loss": 2.5,
    "grad_norm": 0.75,
    "lr": 1e-4,
    "tokens_per_second": 12345.6,
    "model_tflops": 400.25,
    "mfu": 0.4045,
    "device_peak_bytes": 3 * GIB,
    "host_bytes": 100 * GIB,
}


def test_metrics_are_on_disk_line_by_line(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(step=1, loss=2.0)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    writer.write(step=2, loss=float("nan"))
    assert list(read_metrics(tmp_path / "m.jsonl"))[1] == {"step": 2, "loss": None}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_never_stops_the_run(tmp_path):
    path = tmp_path / "m.jsonl"
    path.symlink_to("/dev/full")
    said = []
    writer = MetricsWriter(path, warn=said.append)
    for step in range(3):
        writer.write(step=step)
    assert len(said) == 1
    assert "No space left on device" in said[0]
    path.unlink()  # room again
    for step in (3, 4):
        writer.write(step=step)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_progress_is_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40, soft_wrap=True)
    with TrainingProgress(25, log_every=10, console=console) as progress:
        for step in range(1, 26):
            progress.step(RECORD | {"step": step})
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for part in ("loss 2.5000", "grad 0.75", "lr 0.0001", "12,346 tok/s", "400 TFLOPS"):
        assert part in lines[0]
    for part in ("MFU 40.5%", "device 3.0 GiB", "host 100.0 GiB", "ETA "):
        assert part in lines[0]
    assert "\x1b" not in out.getvalue()


class Stderr(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("where", ["terminal", "file", "dumb", "rank 1"])
def test_what_is_being_done_is_shown_on_a_terminal_until_more_is_said(where, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stderr(where != "file"))
    monkeypatch.setenv("TERM", "dumb" if where == "dumb" else "xterm")
    monkeypatch.setenv("RANK", where.removeprefix("rank ") if "rank" in where else "0")
    monkeypatch.setenv("COLUMNS", "12")
    log = logging.Logger("work")
    log.addHandler(StderrHandler())
    share = Share(log, "weights", 300)
    for _ in range(3):
        share.add(100)  # soon after each other: one is said
    log.log(PASSING, "a long line of words")
    log.info("done")
    log.info("more")
    erase = "\r\x1b[2K"
    passing = f"{erase}weights: 33{erase}a long line{erase}" if where == "terminal" else ""
    assert sys.stderr.getvalue() == f"{passing}done\nmore\n"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_only_a_gpu_that_is_listed_has_a_peak(name, peak):
    assert bf16_peak_tflops(name) == peak


def test_process_memory_is_what_the_system_counts_children_included():
    holding = "held = bytearray(b'1' * (200 << 20)); print(flush=True); input()"
    before = host.ProcessTree(os.getpid()).num_bytes()
    own = psutil.Process().memory_info().rss
    assert own <= before
    command = [sys.executable, "-c", holding]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        after = host.ProcessTree(os.getpid()).num_bytes()
        child.communicate(b"\n")
    assert after > before + 150 * MIB


@pytest.fixture
def cgroup_root(tmp_path, monkeypatch):
    """The folder of the cgroups, with one file: which the process is in."""
    sized(monkeypatch, host, _CGROUPS=tmp_path, _OWN_CGROUP=tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path


def test_the_host_limit_is_the_cgroups_where_that_is_smaller(cgroup_root):
    limit = cgroup_root / "memory.max"
    unlimited = host.host_limit_bytes()
    limit.write_text("max\n")
    assert host.host_limit_bytes() == unlimited
    limit.write_text("1073741824\n")
    assert host.host_limit_bytes() == GIB


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ("0::/slurm/job 7/step_0", "slurm/job 7/step_0/memory.max"),
        ("0::/slurm/job 7/step_0", "slurm/memory.max"),
        ("4:cpu:/a\n3:rdma,memory:/slurm/job\n0::/b", "memory/slurm/job/memory.limit_in_bytes"),
        ("3:memory:/docker/77", "memory/memory.limit_in_bytes"),  # it is the root in a container
    ],
)
def test_the_limit_of_a_job_or_a_service_counts(own, place, cgroup_root):
    (cgroup_root / "own").write_text(own + "\n")
    limit = cgroup_root / place
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text("1073741824\n")
    assert host.host_limit_bytes() == GIB
    (cgroup_root / "own").write_text("4:cpu:/slurm/job\n0::/../outside\n")
    assert (host.host_limit_bytes() == GIB) == (place == "memory/memory.limit_in_bytes")
    (cgroup_root / "own").unlink()
    assert host.host_limit_bytes() >= GIB


def test_what_is_free_is_less_than_the_limit_and_never_negative(cgroup_root):
    limit = cgroup_root / "memory.max"
    assert 0 < host.host_available_bytes() < host.host_limit_bytes()
    limit.write_text(str(host.process_bytes() + 64 * MIB))
    assert 0 < host.host_available_bytes() < 128 * MIB
    limit.write_text("4096")
    assert host.host_available_bytes() == 0


def test_the_environment_is_plain_json_without_names_of_persons_or_hosts():
    record = environment("cpu")
    text = json.dumps(record)
    assert record["packages"]["torch"]
    assert os.uname().nodename not in text
    assert os.path.expanduser("~") not in text


def test_declared_host_memory_counts_instead_of_what_the_system_shows(monkeypatch):
    monkeypatch.setenv("MEGATRAIN_HOST_MEMORY", "1TiB")
    assert host.host_limit_bytes() == 1 << 40
    assert (1 << 40) - (64 << 30) < host.host_available_bytes() < 1 << 40
    monkeypatch.setenv("MEGATRAIN_HOST_MEMORY", "much")
    with pytest.raises(InputError, match="MEGATRAIN_HOST_MEMORY.*much"):
        host.host_available_bytes()


def test_the_commit_is_that_of_this_checkout_or_the_one_declared(monkeypatch):
    monkeypatch.delenv("MEGATRAIN_COMMIT", raising=False)
    found = host.commit()
    assert found is None or len(found) == 40  # None: an unpacked archive
    monkeypatch.setenv("MEGATRAIN_COMMIT", "abc")
    assert environment("cpu")["commit"] == "abc"
