"""The demo with a handful of steps: all its parts, none of its quality."""

from megatrain.cli import demo
from tests.inside import sized


def test_the_demo_trains_and_samples(megatrain, monkeypatch, tmp_path):
    sized(monkeypatch, demo, CORPUS_BYTES=200_000)
    small = ["training.steps=3", "data.sequence_length=32", "engine.device=cpu"]
    options = [part for override in small for part in ("--set", override)]
    result = megatrain("demo", *options)
    assert result.exit_code == 0, result.output
    (run,) = (tmp_path / "runs").glob("demo-2*")
    assert (run / "model" / "config.json").is_file()
    assert "step 3/3" in result.stdout
    assert "def read_" in result.stdout and " at first, " in result.stdout
