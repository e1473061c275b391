"""The documents' numbers are those of the result files."""

import json

from benchmarks.tables import ROOT, sections


def test_the_documents_show_the_results():
    for (document, name), lines in sections().items():
        assert "\n".join(lines) in document.read_text(encoding="utf-8"), (document.name, name)


def test_a_result_carries_what_repeats_it():
    for file in (ROOT / "benchmarks" / "results").glob("step-*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        for key in ("case", "environment", "commit", "median_seconds", "min_seconds", "count"):
            assert result[key], (file.name, key)
