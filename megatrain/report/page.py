"""A run as one self-contained HTML page."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from megatrain.base.whole_files import write_file
from megatrain.errors import InputError
from megatrain.report import sections
from megatrain.report.source import read_run
from megatrain.telemetry.pictures import draw_charts, draw_step

_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        output: the file to write; `report.html` in the run's folder by default.

    Returns:
        The page's path.

    Raises:
        InputError: `folder` is no run's folder, or `output` is another kind of file. The page
            itself says which files the run lacks.
    """
    run = read_run(folder)
    charts = sections.charts(run)
    output = output or folder / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):  # it may be a file of data
        raise InputError(f"{output}: the page would replace it; name one that ends in .html")
    template = Environment(loader=_TEMPLATES, autoescape=True).get_template("run.html")
    page = template.render(
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
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page)
    return output
