"""Writes docs/models.md: `python -m tests.families.report` tries every family."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import media
from tests.families.examine import (
    NOT_TRAINED,
    PASSES,
    REFUSED,
    WRONG,
    Diagnostic,
    examine,
)
from tests.families.examine_media import NOT_TRIED, TEXT_ALONE, MediaDiagnostic, examine_media
from tests.families.folders import from_folders
from tests.families.roundtrip import quiet, round_trips, summary
from tests.families.sizes import VARIANTS
from tests.families.tiny import families, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
WORKERS = 2
MEDIA_TITLE = "## Images and sound"

# What follows from the findings; the rest of the document is written by hand.
COUNTS = """\
Written by `make models`, which tries each of the {count} causal-language-model families of
transformers {version}. **{passing} train as in plain PyTorch**, {refused} are refused with a
reason, and {untrained} cannot be trained on text by PyTorch itself."""
MEDIA_COUNTS = """\
The table compares the {count} multimodal families of transformers with plain PyTorch, as above: a
tiny random model with its encoders takes three steps, with media and text, text alone, and both.
**{passing} pass**, {text} train on text alone, {refused} are refused, {untrained} cannot be made
here, and {untried} have not been tried with media."""


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """The document with other lines between the marks called `name`."""
    begin, end = (f"<!-- {name}:{word} -->" for word in ("begin", "end"))
    before, rest = text.split(begin + "\n")
    return "\n".join([before + begin, *lines, end + rest.split(end)[1]])


def side_by_side(work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """The findings of `work` in several processes, each told as it comes."""
    found = []
    with ProcessPoolExecutor(WORKERS, initializer=quiet) as pool:
        for finding in pool.map(work, *arguments):
            print(finding.name, finding.result, finding.reason, file=sys.stderr, flush=True)
            found.append(finding)
    return found


def put_media(text: str, rows: Mapping[str, str]) -> str:
    """The document with a table of images and sound of these rows by family."""
    count = Counter(row.split(" | ")[1] for row in rows.values())
    results = {"passing": PASSES, "text": TEXT_ALONE, "refused": REFUSED}
    results |= {"untrained": NOT_TRAINED, "untried": NOT_TRIED}
    said = {name: count[result] for name, result in results.items()}
    text = put(text, "media counts", [MEDIA_COUNTS.format(count=len(rows), **said)])
    names = "| family | result | why, or media | loss | update | gradient | trained | saved |"
    order = [rows[family] for family in media.families()]
    return put(text, "media", [names, "|---|---|---|---|---|---|---|---|", *order])


def _media_row(f: MediaDiagnostic) -> str:
    passes = f.result == PASSES
    errors = [f.errors.loss, f.errors.update, f.errors.gradient, f.trained.gradient]
    cells = [_error(value) if passes else "" for value in errors]
    if not f.trained.first:
        cells[-1] = ""
    if f.all_trained:
        cells[-1] = f"no: {f.all_trained}"
    cells.append("exact" if passes and f.round_trip else "")
    why = ", ".join(f"`{name}`" for name in f.media) if passes else f.reason
    return f"| {' | '.join([f.name, f.result, why, *cells])} |"


def _try(family: str, changes: dict[str, Any] | None, name: str) -> Diagnostic:
    finding = examine(family, changes, name)
    if finding.result == PASSES:
        finding.folder = from_folders(family, changes)
        trips = round_trips(tiny_model(family, changes=changes))
        finding.resume = summary(trips)
        failures = [text for text in trips.values() if text.startswith(WRONG)]
        if failures := finding.folder.failures + failures:
            finding.result, finding.reason = WRONG, "; ".join(failures)
    return finding


def put_families(text: str, findings: list[Diagnostic]) -> str:
    """The document with the tables of families and variants."""
    own = [f for f in findings if f.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    others = [f for f in findings if f.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    results = {"passing": PASSES, "refused": REFUSED, "untrained": NOT_TRAINED}
    said = {name: sum(f.result == result for f in own) for name, result in results.items()}
    counts = COUNTS.format(count=len(own), version=transformers.__version__, **said)
    lines = [
        "\n## Refused, or not trainable\n",
        *_reasons([f for f in own if f.result != PASSES]),
        "\n## Variants\n",
        "Switches that released checkpoints set otherwise than the class does.\n",
        *_reasons([f for f in others if f.result != PASSES]),
        "",
        *_table([f for f in others if f.result == PASSES]),
        "\n## Passing families\n",
        *_table([f for f in own if f.result == PASSES]),
    ]
    return put(put(text, "counts", [counts]), "tables", lines)


def _reasons(findings: list[Diagnostic]) -> list[str]:
    rows = [f"| {f.name} | {f.result} | {f.reason} |" for f in findings]
    return ["| name | result | why |", "|---|---|---|", *rows]


def _table(findings: list[Diagnostic]) -> list[str]:
    rows = [[str(cell(finding)) for cell in COLUMNS.values()] for finding in findings]
    return [f"| {' | '.join(row)} |" for row in [[*COLUMNS], ["---"] * len(COLUMNS), *rows]]


def _error(value: float | None) -> str:
    return "no" if value is None else f"{value:.0e}"


# Of the tables of what passes, from left to right: name and what is said of a finding.
COLUMNS: dict[str, Callable[[Diagnostic], Any]] = {
    "name": lambda f: f.name,
    "result": lambda f: f.result,
    "loss": lambda f: _error(f.errors.loss),
    "own loss": lambda f: _error(f.errors.own),
    "update": lambda f: _error(f.errors.update),
    "gradient": lambda f: _error(f.errors.gradient),
    "open": lambda f: len(f.errors.noisy) or "",
    "bf16": lambda f: _error(f.bf16),
    "folder": lambda f: _error(f.folder.loss),
    "folder in bf16": lambda f: _error(f.folder.bf16),
    "resume": lambda f: f.resume,
    "layers": lambda f: f.layers,
    "tied": lambda f: "yes" if f.tied else "",
    "notes": lambda f: "; ".join(f.notes),
}


def documents_this_version() -> bool:
    """Whether the document was written with the installed transformers."""
    return f"transformers {transformers.__version__}." in DOCUMENT.read_text()


def documented() -> dict[str, tuple[str, str]]:
    """Result and reason of every family and variant, as the document says."""
    return _rows(DOCUMENT.read_text().split(MEDIA_TITLE)[0])


def documented_media() -> dict[str, tuple[str, str]]:
    """The same of every multimodal family on its media."""
    return _rows(DOCUMENT.read_text().split(MEDIA_TITLE)[-1])


def _rows(text: str) -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", text, re.MULTILINE)
    return {
        name: (result, "" if result == PASSES else reason)
        for name, result, reason in rows
        if name not in ("name", "family", "---")
    }


def main() -> None:
    """Try everything and write the document; exit status 1 if anything is wrong.

    Multimodal families that are named are tried alone, and their rows are written anew.
    """
    names, text, findings = sys.argv[1:], DOCUMENT.read_text(), list[Diagnostic]()
    table = re.findall(r"^\| .*\|$", text.partition(MEDIA_TITLE)[2], re.M)
    rows = {row.split(" | ")[0][2:]: row for row in table}
    if not names:
        wanted = [(f, None, f) for f in families()]
        wanted += [(family, changes, name) for name, (family, changes) in VARIANTS.items()]
        findings = side_by_side(_try, *zip(*wanted, strict=True))
        text = put_families(text, findings)
    chosen = [family for family in media.families() if not names or family in names]
    of_media = side_by_side(examine_media, chosen)
    rows |= {finding.name: _media_row(finding) for finding in of_media}
    DOCUMENT.write_text(put_media(text, {family: rows[family] for family in media.families()}))
    wrong = [f for f in (*findings, *of_media) if f.result == WRONG]
    for finding in wrong:
        print(f"WRONG: {finding.name}: {finding.reason}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
