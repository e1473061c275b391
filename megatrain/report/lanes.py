"""A recorded step as lanes, one a stream, with time from left to right."""

from collections.abc import Sequence

from megatrain.report.markup import data, seconds, text, ticks
from megatrain.telemetry.pictures import LANES, MEANINGS, word_of
from megatrain.telemetry.timeline import Span

LANE_HEIGHT, BAR_HEIGHT = 40, 30


def draw(spans: Sequence[Span]) -> str:
    """The lanes as an HTML figure with buttons; empty without spans."""
    if not spans:
        return ""
    lanes = _lanes(spans)
    end = max(span.end for span in spans)
    height = LANE_HEIGHT * len(lanes)
    bars = "".join(
        _bar(number, span, lanes.index(span.stream)) for number, span in enumerate(spans)
    )
    names = "".join(f"<span>{text(lane)}</span>" for lane in lanes)
    found = {word_of(span.name) for span in spans}
    legend = "".join(
        f'<li><i class="k-{word}"></i>{text(meaning)}</li>'
        for word, meaning in MEANINGS.items()
        if word in found
    )
    words = [[span.name, seconds(span.seconds), seconds(span.start), *span.after] for span in spans]
    whole = f"{len(spans):,} pieces of work on {len(lanes)} streams in {seconds(end)}"
    return (
        f'<figure class="lanes" data-end="{end:.6f}" data-spans="{data(words)}">'
        f'<ul class="legend">{legend}</ul><div class="plot"><div class="names">{names}</div>'
        f'<div class="area" tabindex="0" aria-label="Timeline; plus and minus zoom, arrows move, '
        f'0 shows all"><svg viewBox="0 0 {end:.6f} {height}" preserveAspectRatio="none" role="img" '
        f'style="height:{height}px" aria-label="{text(whole)}">{bars}</svg></div>'
        f'<div></div><div class="places" aria-hidden="true">{_places(end)}</div></div>'
        f'<div class="buttons" role="group" aria-label="Zoom">'
        f'<button type="button" data-do="in">Zoom in</button>'
        f'<button type="button" data-do="out">Zoom out</button>'
        f'<button type="button" data-do="left" aria-label="Earlier">&larr;</button>'
        f'<button type="button" data-do="right" aria-label="Later">&rarr;</button>'
        f'<button type="button" data-do="all">Whole step</button></div>'
        f'<p class="reading" data-whole="{text(whole)}">{text(whole)}</p></figure>'
    )


def _lanes(spans: Sequence[Span]) -> list[str]:
    found = dict.fromkeys(span.stream for span in spans)
    return [*(lane for lane in LANES if lane in found), *(s for s in found if s not in LANES)]


def _bar(number: int, span: Span, lane: int) -> str:
    odd = " odd" if _is_odd(span.name) else ""
    y = lane * LANE_HEIGHT + (LANE_HEIGHT - BAR_HEIGHT) / 2
    return (
        f'<rect class="k-{word_of(span.name)}{odd}" x="{span.start:.6f}" y="{y:g}" '
        f'width="{span.seconds:.6f}" height="{BAR_HEIGHT}" data-n="{number}"/>'
    )


def _is_odd(name: str) -> bool:
    """Whether it is an odd layer's: neighbours are told apart by their shade."""
    return any(word.isdigit() and int(word) % 2 for word in name.split()[:3])


def _places(end: float) -> str:
    return "".join(
        f'<span style="left:{100 * t / end:.2f}%">{text(seconds(t) if t else "0 s")}</span>'
        for t in ticks(0.0, end, 5)
        if t < 0.98 * end
    )
