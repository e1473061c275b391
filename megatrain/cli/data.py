"""`megatrain data`: the data of a run file in numbers, and rows of it as they are trained."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatrain import config
from megatrain.data.preview import ShownDocument, shown, summary
from megatrain.telemetry.console import say

_LONGEST = 3000  # characters of a document that are shown, at most


def show_data(run: Path, overrides: Sequence[str], rows: int) -> None:
    """Print the data of a run file. Raises InputError: the run file or its data cannot be used."""
    loaded = config.load(run, overrides, endless=True)
    from megatrain.train.resolve import data_alone

    tokenizer, training, evaluation = data_alone(loaded)
    console = Console(highlight=False)
    for line in summary(training):
        say(console, line)
    if evaluation:
        print()
    for set_name, data in evaluation.items():
        title = f"evaluation, {set_name}" if set_name else "evaluation"
        print(f"{title}: {data.num_tokens:,} tokens in {len(data):,} rows")
    for row in range(min(rows, len(training))):
        _print_row(console, row, shown(training, row, tokenizer))


def _print_row(console: Console, row: int, pieces: Sequence[ShownDocument]) -> None:
    """Print a row; learnt text is coloured, or without colours in brackets."""
    has_colours = console.color_system is not None
    legend = "green: learnt" if has_colours else "⟦ ⟧: learnt"
    console.print(Text(f"\nrow {row + 1} ({legend})", style="bold"), soft_wrap=True)
    for piece in pieces:
        title = f"-- {piece.place}: {piece.num_tokens:,} tokens"
        for line in (title, *(f"   {image}" for image in piece.images)):
            console.print(Text(line, style="cyan"), soft_wrap=True)
        text, characters_left = Text(), _LONGEST
        for characters, is_learnt in piece.runs:
            part = characters[: max(characters_left, 0)]
            characters_left -= len(characters)
            part = f"⟦{part}⟧" if is_learnt and not has_colours and part else part
            text.append(part, style="green" if is_learnt else "dim")
        if characters_left < 0:
            text.append(f" ... {-characters_left:,} more characters", style="cyan")
        console.print(text, soft_wrap=True)
