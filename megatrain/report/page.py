"""A run as one HTML page that needs nothing but itself."""

from importlib import resources
from pathlib import Path

from megatrain.base.whole_files import write_file
from megatrain.errors import InputError
from megatrain.report import sections
from megatrain.report.lanes import draw as draw_lanes
from megatrain.report.markup import text
from megatrain.report.source import Source, read_source

# The page may load nothing at all, and a browser holds it to that.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(path: Path, output: Path | None = None, timeline: Path | None = None) -> Path:
    """Write the page of a run's folder, or of a result of `megatrain bench step`.

    Args:
        output: where to; in the folder, or beside the result, by default.
        timeline: a trace other than the run's own `timeline.json`.

    Returns:
        The page's path.

    Raises:
        InputError: `path` is neither, or there is no `timeline`. What a run lacks is said on its
            page.
    """
    if timeline is not None and not timeline.is_file():
        raise InputError(f"{timeline}: no such file; give a trace, or leave --timeline out")
    source = read_source(path, timeline)
    if output is None:
        output = path / "report.html" if path.is_dir() else path.with_suffix(".html")
    write_page(output, page(source))
    return output


def write_page(output: Path, content: str) -> None:
    """Write a page, whole or not at all.

    Raises:
        InputError: another kind of file is named, which may be somebody's data.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{output}: the page would replace it; name one that ends in .html")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, content)


def page(source: Source) -> str:
    """The whole page."""
    body = [
        sections.figures(source),
        sections.charts(source) if source.metrics.num_steps else "",
        sections.samples(source),
        _timeline(source),
        sections.breakdown(source.breakdown),
        sections.facts(source),
    ]
    header = (
        f"<header><h1>{text(source.name)}</h1><p>{text(source.status)}</p>{_notes(source)}</header>"
    )
    script = f"<script>\n{own('page.js')}</script>\n"
    return framed(
        f"{source.name} - MegaTrain report", header + "\n".join(filter(None, body)), script=script
    )


def framed(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """An HTML page around its body, with the style that pages share and more of its own."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{own('page.css')}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{script}</body>\n</html>\n"
    )


def _notes(source: Source) -> str:
    metrics = source.metrics
    notes = list(source.missing)
    if metrics.resumed:
        times = "once" if metrics.resumed == 1 else f"{metrics.resumed} times"
        notes.append(f"The run went back to an earlier step {times}; what it repeated counts once.")
    if metrics.skipped:
        notes.append(f"{metrics.skipped:,} steps were left out.")
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _timeline(source: Source) -> str:
    if not source.spans:
        return ""
    step = f" {source.recorded_step:,}" if source.recorded_step else ""
    return f"<section><h2>Timeline of step{step}</h2>{draw_lanes(source.spans)}</section>"


def own(name: str) -> str:
    """The text of a file of this part."""
    return resources.files("megatrain.report").joinpath(name).read_text(encoding="utf-8")
