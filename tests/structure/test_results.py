"""The documents' numbers are those of the result files."""

import inspect
import json

from benchmarks.step import step
from benchmarks.tables import OPTIONS, ROOT, command, sections, steps


def test_the_documents_show_the_results():
    for (document, name), lines in sections().items():
        assert "\n".join(lines) in document.read_text(encoding="utf-8"), (document.name, name)


def test_a_command_measures_the_case_that_was_measured():
    """Every option that a case may have is one of the command, and is named where it is used."""
    assert set(OPTIONS) <= set(inspect.signature(step).parameters)
    [plain, *_] = [each for each in steps() if "attention_tflops" not in each]
    told = command({**plain, "case": {**plain["case"], **dict.fromkeys(OPTIONS, "other")}})
    for name in OPTIONS:
        assert f" --{name.replace('_', '-')} other" in told, name


def test_a_result_carries_what_repeats_it():
    for file in (ROOT / "benchmarks" / "results").glob("step-*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        for key in ("case", "environment", "commit", "median_seconds", "min_seconds", "count"):
            assert result[key], (file.name, key)
