"""`megatrain data`: the data of a run file in numbers, and rows of it as they are trained."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatrain import config
from megatrain.data.preview import ShownDocument, Summary, shown
from megatrain.telemetry.console import say

_BAR = 40  # characters of the longest bar
_LONGEST = 3000  # most characters shown of a document
_SOURCES = 20


def show_data(run: Path, overrides: Sequence[str], rows: int) -> None:
    """Print the data of a run file. Raises InputError: the run file or its data cannot be used."""
    loaded = config.load(run, overrides, endless=True)
    from megatrain.train.data import data_alone

    tokenizer, training, evaluation = data_alone(loaded)
    console = Console(highlight=False)
    summary = Summary(training)
    _print_summary(console, summary)
    if evaluation:
        print()
    for set_name, held in evaluation.items():
        title = f"evaluation, {set_name}" if set_name else "evaluation"
        print(f"{title}: {held.num_tokens:,} tokens in {len(held):,} rows")
    for row in range(min(rows, len(training))):
        _print_row(console, row, shown(training, row, tokenizer))


def _print_summary(console: Console, summary: Summary) -> None:
    documents = summary.what
    counts, tokens = summary.facts()
    say(console, f"training: {counts}")
    say(console, tokens)
    for note in summary.notes():
        say(console, note)
    say(console, f"\ntokens by source{f' in {summary.folder}' if summary.folder else ''}")
    widest = sorted(summary.sources, key=lambda source: -source.tokens)
    for source in widest[:_SOURCES]:
        say(console, f"  {source.tokens:>14,}  {source.documents:>10,} {documents}  {source.name}")
    if (num_hidden := len(widest) - _SOURCES) > 0:
        say(console, f"  {sum(s.tokens for s in widest[_SOURCES:]):>14,}  in {num_hidden:,} more")
    say(console, f"\nlengths of {documents} in tokens")
    histogram = summary.histogram()
    largest_count = max(count for *_, count in histogram)
    for shortest, longest, count in histogram:
        bar = "█" * max(round(_BAR * count / largest_count), bool(count))
        say(console, f"  {shortest:>8,} - {longest:<8,} {count:>10,} {bar}")


def _print_row(console: Console, row: int, pieces: Sequence[ShownDocument]) -> None:
    """Print a row; learnt text is coloured, or in brackets without colours."""
    coloured = console.color_system is not None
    legend = "green: learnt" if coloured else "⟦ ⟧: learnt"
    console.print(Text(f"\nrow {row + 1} ({legend})", style="bold"), soft_wrap=True)
    for piece in pieces:
        console.print(
            Text(f"-- {piece.place}: {piece.num_tokens:,} tokens", style="cyan"), soft_wrap=True
        )
        for image in piece.images:
            console.print(Text(f"   image {image}", style="cyan"), soft_wrap=True)
        text, room = Text(), _LONGEST
        for run in piece.runs:
            part = run.text[: max(room, 0)]
            room -= len(run.text)
            part = f"⟦{part}⟧" if run.learnt and not coloured and part else part
            text.append(part, style="green" if run.learnt else "dim")
        if room < 0:
            text.append(f" ... {-room:,} more characters", style="cyan")
        console.print(text, soft_wrap=True)
