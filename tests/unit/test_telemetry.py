"""Metrics that survive a full disk, progress, timelines, the clock, and facts of machines."""

import io
import json
import logging
import os
import random
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr
from unittest import mock

import psutil
import pytest
import torch
from rich.console import Console

from megatrain.base.units import GIB, MIB, parse_bytes, size
from megatrain.errors import InputError, RunFailed
from megatrain.telemetry import host, timeline
from megatrain.telemetry.console import PASSING, Share, StderrHandler, TrainingProgress, say
from megatrain.telemetry.host import environment
from megatrain.telemetry.metrics import MetricsWriter, read_metrics
from megatrain.telemetry.timeline import Span, breakdown, critical_path, read_trace
from megatrain.train.loop import draw
from megatrain.train.steps import RunTimeline
from tests.forks import forked
from tests.inside import sized
from tests.parity.cases import llama, make_engine
from tests.unit.test_report import record


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_never_stops_the_run(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.symlink_to("/dev/full")
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write(step=step)
    [said] = caplog.messages
    assert "No space left on device" in said
    path.unlink()  # room again
    writer.write(step=3)
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 3}  # at once
    writer.write(step=4, loss=float("nan"))
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert [*read_metrics(path)][-1] == {"step": 4, "loss": None}


def test_progress_is_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40, soft_wrap=True)
    with TrainingProgress(25, log_every=10, console=console) as progress:
        for step in range(1, 26):
            progress.step(record(step, tokens_per_second=12345.6, mfu=0.4045))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    for part in ("loss 10.0000", "grad 1", "lr 0.0001", "12,346 tok/s", "400 TFLOPS"):
        assert part in lines[0]
    for part in ("MFU 40.5%", "device 3.0 GiB", "host 14.0 GiB", "ETA "):
        assert part in lines[0]
    assert "\x1b" not in out.getvalue()


def test_what_follows_a_line_begins_below_its_text():
    """A label, a mark of a list and spaces before a text stay alone in their columns."""
    out = io.StringIO()
    texts = (
        "device   two of three GiB",
        "- a thing to do\n  and its remedy",
        "no mark of any kind",
    )
    for text in texts:
        say(Console(file=out, force_terminal=True, width=17), text)
    assert out.getvalue().splitlines() == [
        *("device   two of", "         three", "         GiB"),
        *("- a thing to do", "  and its remedy", "no mark of any", "kind"),
    ]


class Stderr(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("where", ["terminal", "file", "dumb", "rank 1"])
def test_what_is_being_done_is_shown_on_a_terminal_until_more_is_said(where, monkeypatch):
    monkeypatch.setenv("TERM", "dumb" if where == "dumb" else "xterm")
    monkeypatch.setenv("RANK", where.removeprefix("rank ") if "rank" in where else "0")
    monkeypatch.setenv("COLUMNS", "12")
    with redirect_stderr(Stderr(where != "file")) as stderr:
        log = logging.Logger("work")
        log.addHandler(StderrHandler())
        share = Share(log, "weights", 300)
        for _ in range(3):
            share.add(100)  # soon after each other: one is said
        log.log(PASSING, "a long line of words")
        log.log(PASSING, "loss 1  grad 23")  # a number cut short would be another one
        log.info("done")
        log.info("more")
    erase = "\r\x1b[2K"
    lines = f"{erase}weights: 33{erase}a long line{erase}loss 1{erase}"
    passing = lines if where == "terminal" else ""
    assert stderr.getvalue() == f"{passing}done\nmore\n"


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
    monkeypatch.delenv("MEGATRAIN_HOST_MEMORY")
    sized(monkeypatch, host, _CGROUPS=tmp_path, _OWN_CGROUP=tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ("0::/", "memory.max"),
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
    limit.write_text("max\n")
    assert host.host_limit_bytes() > GIB
    limit.write_text("1073741824\n")
    assert host.host_limit_bytes() == GIB
    (cgroup_root / "own").write_text("4:cpu:/slurm/job\n0::/../outside\n")
    at_the_root = place in ("memory.max", "memory/memory.limit_in_bytes")
    assert (host.host_limit_bytes() == GIB) == at_the_root
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
    found = environment("cpu")
    text = json.dumps(found)
    assert found["packages"]["torch"]
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


# A process that is allowed some of the machine's cores does not plan with the others.

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")


def test_a_core_that_is_not_allowed_is_not_counted():
    def child():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert host.usable_cores() == 1

    assert forked(child) == 0


# Sizes as people write and read them.


def test_what_is_said_to_be_enough_is_enough():
    numbers = random.Random(0)
    for _ in range(1000):
        needed = numbers.randrange(1, 600 * GIB)
        given = parse_bytes(size(needed))
        assert needed <= given < needed + GIB // 10 + MIB


@pytest.mark.parametrize("text", ["9" * 400, "99999999TiB", 10**400, "1e3", "-5", "", "10 gigs"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="^not a size"):
        parse_bytes(text)


# Timelines of steps, and the device that keeps time.


SPANS = [
    Span("compute", "layer 0", 0.0, 1.0),
    Span("copy in", "layer 1 weights -> slot 1", 0.5, 2.5, ("version due",)),
    Span("compute", "layer 1", 2.5, 3.5, ("weights arrived",)),
    Span("compute", "layer 1 backward", 3.6, 5.0),
    Span("update", "update layer 0", 4.0, 6.0),
]


def test_idle_time_is_put_down_to_what_was_waited_for():
    found = breakdown(SPANS, "compute")
    assert found.seconds == 6.0
    assert found.busy == pytest.approx({"compute": 3.4, "copy in": 2.0, "update": 2.0})
    assert found.idle == pytest.approx({"weights arrived": 1.5, "launch": 0.1, "end of step": 1.0})
    assert found.work["compute", "layer"] == pytest.approx(2.0)  # numbers are left out of names
    assert found.rows()[0] == ("compute: layer", pytest.approx(2.0))


def test_a_part_of_a_recording_has_its_part_of_the_bytes():
    spans = [Span("copy in", "layer 0", 1.0, 3.0, (), 100)]
    assert timeline.window(spans, 2.0, 9.0) == [Span("copy in", "layer 0", 0.0, 1.0, (), 50)]


def test_the_critical_path_leads_from_the_end_to_the_beginning():
    """Computing takes most of the time, and waits for updates most of it."""
    spans = [
        Span("update", "update layer 0", 0.0, 2.0),
        Span("compute", "layer 1", 0.1, 1.9),
        Span("compute", "layer 0", 2.0, 3.0),
        Span("update", "update layer 1", 2.5, 2.9),
        Span("reduce", "sums", 3.1, 4.0),
        Span("copy out", "gradient", 3.5, 3.6),
    ]
    path = critical_path(spans)
    assert path == pytest.approx({"update": 2.0, "compute": 1.0, "reduce": 0.9, "launches": 0.1})
    assert breakdown(spans, "compute").busy["compute"] > path["update"] * 1.2


# Steps of a run, those that are refused, and the one whose timeline is kept.
RUNS = [(1, (), 1), (2, (), 2), (8, (), 6), (9, (5,), 7), (9, (6,), 8)]


@pytest.mark.parametrize(("steps", "refused", "kept"), RUNS)
def test_a_run_keeps_the_timeline_of_an_early_step(tmp_path, steps, refused, kept):
    ids, file, told = torch.ones(2, 4).long(), tmp_path / "timeline.json", []
    refusing = mock.Mock(side_effect=RunFailed("not finite"))
    batch = [{"input_ids": ids, "labels": ids}]
    with make_engine(llama()) as engine:
        timeline = RunTimeline(engine.recording, tmp_path, steps)
        for number in range(1, steps + 1):
            with pytest.raises(RunFailed) if number in refused else nullcontext():
                timeline.step(number, refusing if number in refused else lambda: engine.step(batch))
            if timeline.breakdown is not None:
                told.append(number)
                assert timeline.breakdown.busy["compute"] > 0
            last = json.loads(file.read_text())["otherData"]["step"] if file.exists() else None
            assert last == (told[-1] if told else None)
    assert told == [kept]
    spans = read_trace(json.loads(file.read_text()))
    names = [span.name for span in spans]
    assert names.count("layer 0") == names.count("layer 2 backward") == 1
    assert next(s for s in spans if s.name == "update layer 0").num_bytes > 0
    if steps == 8:
        (tmp_path / "metrics.jsonl").touch()
        draw(tmp_path)
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
