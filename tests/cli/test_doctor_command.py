"""`megatrain doctor` on a machine without a GPU."""

import json

import pytest

from megatrain.plan import doctor
from megatrain.plan.doctor import Measurement
from tests.inside import answering


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The host's measurements take their time; what is done with them does not depend on it."""
    found = [
        Measurement("update_gparams", "AdamW on the host", 1.25, "Gparam/s"),
        Measurement("disk_write_gbps", "disk, write", None, "GB/s", "it is full"),
    ]
    answering(monkeypatch, doctor, host_measurements=found)


def test_a_table_for_people(megatrain):
    result = megatrain("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "AdamW on the host  1.25  Gparam/s" in result.stdout
    assert "disk, write: not measured because it is full" in result.stdout
    assert "without a GPU there is nothing to keep" in result.stdout


def test_json_for_programs(megatrain):
    result = megatrain("doctor", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["measurements"][0]["value"] == 1.25
    assert told["facts"]["gpu"] is None and told["machines"] == {} and told["kept"] is None
    assert all(finding["remedy"] for finding in told["findings"])


def test_a_wrong_device_is_refused(megatrain):
    result = megatrain("doctor", "--device", "tpu")
    assert result.exit_code == 2
    assert "no device 'tpu'; write cpu, cuda or cuda:N" in result.stderr
