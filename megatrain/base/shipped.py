"""Documents and examples that come with the package."""

from pathlib import Path


def shipped(name: str) -> Path:
    """The path of `docs/...` or `examples/...` in the installed package or the checkout."""
    package = Path(__file__).parents[1]
    places = [folder / name for folder in (package, package.parent)]
    return next((path for path in places if path.is_file()), places[0])
