"""The commands `doctor`, on a machine without a GPU, `init` and `report`."""

import getpass
import json
import platform
from pathlib import Path

import pytest

from megatrain import config
from megatrain.plan import doctor
from megatrain.plan.doctor import Measurement
from tests.inside import answering
from tests.unit.test_report import Page


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The host's measurements take their time; what is done with them does not depend on it."""
    found = [
        Measurement("update_gparams", "AdamW on the host", 1.25, "Gparam/s"),
        Measurement("disk_write_gbps", "disk, write", None, "GB/s", "it is full"),
    ]
    answering(monkeypatch, doctor, host_measurements=found)


def test_a_table_for_people_and_json_for_programs(megatrain):
    result = megatrain.done("doctor", "--device", "cpu")
    assert "AdamW on the host  1.25  Gparam/s" in result.stdout
    assert "disk, write: not measured because it is full" in result.stdout
    assert "without a GPU there is nothing to keep" in result.stdout
    told = json.loads(megatrain.done("doctor", "--device", "cpu", "--json").stdout)
    assert told["measurements"][0]["value"] == 1.25
    assert told["facts"]["gpu"] is None and told["machines"] == {} and told["kept"] is None
    assert all(finding["remedy"] for finding in told["findings"])
    megatrain.refused(
        "no device 'tpu'; write cpu, cuda, cuda:N or mps", "doctor", "--device", "tpu"
    )


def test_a_block_for_an_issue_names_no_place(megatrain, tmp_path):
    result = megatrain.done("doctor", "--device", "cpu", "--share", "--folder", tmp_path)
    told = json.loads(result.stdout)
    assert told["measured"]["AdamW on the host"] == [1.25, "Gparam/s"]
    assert told["usable_cores"] > 0 and told["host_memory_bytes"] > 0 and told["gpu"] is None
    for private in (str(tmp_path), platform.node(), getpass.getuser()):
        assert f'"{private}"' not in result.stdout and f"/{private}/" not in result.stdout
    issue = Path(__file__).parents[2] / ".github/ISSUE_TEMPLATE/machine.yml"
    assert "megatrain doctor --share" in issue.read_text(encoding="utf-8")


@pytest.mark.parametrize("example", ["chat", "lora", "dpo", "grpo", "demo"])
def test_a_run_file_is_written_and_can_be_read(megatrain, example):
    megatrain.done("init", "mine/run.yaml", "--example", example)
    loaded, text = config.load("mine/run.yaml"), Path("mine/run.yaml").read_text()
    assert "megatrain train mine/run.yaml" in text and "examples/" not in text
    for document in (word for word in text.split() if word.endswith(".md")):
        assert Path(document).is_file() and Path(document).is_absolute()
    for reward in loaded.rollout.rewards:
        assert reward.startswith("mine/grpo_rewards.py:") and Path("mine/grpo_rewards.py").is_file()


def test_nothing_is_replaced(megatrain):
    for there in ("grpo_rewards.py", "run.yaml"):
        Path(there).write_text("mine")
        megatrain.refused(f"{there}: is there already", "init", "--example", "grpo")
        assert {path.read_text() for path in Path().glob("*.*")} == {"mine"}
        Path(there).unlink()


def test_a_finished_run_has_a_page(megatrain, trained, tmp_path):
    folder, _ = trained
    result = megatrain.done("report", folder, "--output", tmp_path / "pages" / "run.html")
    assert result.stdout.strip() == str(tmp_path / "pages" / "run.html")
    page = Page((tmp_path / "pages" / "run.html").read_text())
    for part in ("Finished: 6 of 6 steps.", "Timeline of step 6", "model_type: llama", "update"):
        assert part in page.text, part
    assert "Host memory, at peak" in page.text and "Device memory" not in page.text  # on the CPU
    assert "is not there" not in page.text
    told = "name one that ends in .html"
    megatrain.refused(told, "report", folder, "--output", folder / "metrics.jsonl")


def test_what_is_no_run_is_refused_in_one_line(megatrain, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("hello")
    for name in ("empty", "text.json", "gone"):
        megatrain.refused(name, "report", tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "text.json"}
