"""A run, or its data, as one HTML page that needs nothing but itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from megatrain.base.whole_files import write_file
from megatrain.data.preview import ShownDocument, Summary
from megatrain.errors import InputError
from megatrain.report import sections
from megatrain.report.source import read_run
from megatrain.telemetry.pictures import draw_charts, draw_step

_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
_LONGEST = 20_000  # characters of a document


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        output: the file to write; `report.html` in the run's folder by default.

    Returns:
        The page's path.

    Raises:
        InputError: `folder` is no run's folder. The page itself names what a run lacks.
    """
    run = read_run(folder)
    charts = sections.charts(run)
    output = output or folder / "report.html"
    _write(
        output,
        "run.html",
        name=run.name,
        status=run.status,
        notes=run.notes,
        figures=sections.figures(run),
        charts=sections.picture(draw_charts, charts),
        summaries=[sections.summary(chart) for chart in charts],
        samples=run.metrics.samples,
        sampled=f"{run.metrics.sampled:,.0f}",
        timeline=sections.picture(draw_step, run.spans),
        recorded_step=run.recorded_step or "",
        files={
            "Machine, versions and placement": sections.as_yaml(run.environment),
            "Configuration": sections.as_yaml(run.config),
        },
        **sections.breakdown_tables(run.breakdown),
    )
    return output


def write_data_page(
    output: Path, name: str, summary: Summary, rows: Sequence[Sequence[ShownDocument]]
) -> None:
    """Write the page of a run's data: counts, lengths, and rows with what is learnt marked."""
    total = sum(source.tokens for source in summary.sources)
    histogram = summary.histogram()
    _write(
        output,
        "data.html",
        name=f"{name}: data",
        facts=". ".join(summary.facts()),
        notes=summary.notes(),
        folder=summary.folder,
        what=summary.what,
        sources=[
            (s.name, f"{s.documents:,}", f"{s.tokens:,}", f"{s.tokens / total:.0%}")
            for s in summary.sources
        ],
        histogram=histogram,
        most=max(count for *_, count in histogram),
        rows=[[(document, *_shortened(document)) for document in row] for row in rows],
    )


def _shortened(document: ShownDocument) -> tuple[list[tuple[str, bool]], int]:
    """The first characters of a document, and how many are left out."""
    room, runs = _LONGEST, []
    for run in document.runs:
        if room > 0:
            runs.append((run.text[:room], run.learnt))
        room -= len(run.text)
    return runs, max(0, -room)


def _write(output: Path, template: str, **values: Any) -> None:
    """Write a page, whole or not at all.

    Raises:
        InputError: `output` is no HTML file, and may hold somebody's data.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{output}: the page would replace it; name one that ends in .html")
    output.parent.mkdir(parents=True, exist_ok=True)
    environment = Environment(loader=_TEMPLATES, autoescape=True)
    write_file(output, environment.get_template(template).render(values))
