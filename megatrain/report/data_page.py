"""The data of a run as one HTML page: counts, lengths, and rows with what is learnt marked."""

from collections.abc import Sequence
from pathlib import Path

from megatrain.data.preview import ShownDocument, Summary
from megatrain.report.markup import table, text
from megatrain.report.page import framed, write_page

_LONGEST = 20_000  # characters of a document
_STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .75rem;
  border: 1px solid var(--rule); border-radius: 6px; color: var(--soft); margin: .25rem 0 1rem; }
mark { color: var(--ink); border-radius: 2px;
  background: color-mix(in srgb, var(--s0) 18%, transparent); }
.bar { background: var(--s0); height: .8rem; border-radius: 2px; min-width: 1px; }
.lengths th:last-child { width: 60%; }
header p, .note, td { overflow-wrap: anywhere; }
"""


def write_data_page(
    path: Path, name: str, summary: Summary, rows: Sequence[Sequence[ShownDocument]]
) -> None:
    """Write the page to `path`, whole or not at all."""
    what, facts = summary.what, ". ".join(summary.facts())
    notes = "".join(f"<p>{text(note)}.</p>" for note in summary.notes())
    total = sum(source.tokens for source in summary.sources)
    sources = [
        [text(s.name), f"{s.documents:,}", f"{s.tokens:,}", f"{s.tokens / total:.0%}"]
        for s in summary.sources
    ]
    folder = f"<p>In {text(summary.folder)}</p>" if summary.folder else ""
    body = [
        f"<header><h1>{text(name)}: data</h1><p>{text(facts)}.</p>{notes}</header>",
        f"<section><h2>Sources</h2>{folder}"
        + table(["source", what, "tokens", "share"], sources, label="sources", numbers=3)
        + "</section>",
        f"<section><h2>Lengths of {what} in tokens</h2>{_histogram(summary)}</section>",
        f"<section><h2>The first {len(rows)} rows</h2><p><mark>Marked</mark>: what is learnt.</p>"
        + "".join(_row(number, row) for number, row in enumerate(rows, start=1))
        + "</section>",
    ]
    title = f"{name} - MegaTrain data"
    write_page(path, framed(title, "\n".join(body), style=_STYLE))


def _histogram(summary: Summary) -> str:
    histogram = summary.histogram()
    most = max(count for *_, count in histogram)
    rows = [
        [
            f"{shortest:,} - {longest:,}",
            f"{count:,}",
            f'<div class="bar" style="width:{100 * count / most:.1f}%"></div>',
        ]
        for shortest, longest, count in histogram
    ]
    return f'<div class="lengths">{table(["tokens", "count", ""], rows, label="lengths")}</div>'


def _row(number: int, pieces: Sequence[ShownDocument]) -> str:
    parts = [f"<h3>Row {number}</h3>"]
    for piece in pieces:
        shown, room = [], _LONGEST
        for run in piece.runs:
            part = text(run.text[: max(room, 0)])
            room -= len(run.text)
            shown.append(f"<mark>{part}</mark>" if run.learnt and part else part)
        if room < 0:
            shown.append(f" ... {-room:,} more characters")
        parts.append(
            f'<p class="note">{text(piece.place)}: {piece.num_tokens:,} tokens</p>'
            f"<pre>{''.join(shown)}</pre>"
        )
    return "".join(parts)
