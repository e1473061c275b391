"""The README's numbers are those of the result files."""

import json

from benchmarks.tables import ROOT, section


def test_the_readme_shows_the_results():
    assert section() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_result_carries_what_repeats_it():
    for file in (ROOT / "benchmarks" / "results").glob("step-*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        for key in ("case", "environment", "commit", "median_seconds", "min_seconds", "count"):
            assert result[key], (file.name, key)
