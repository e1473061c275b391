from collections.abc import Iterator

import pytest

from megatrain.checkpoint import files
from tests.inside import sized


@pytest.fixture(scope="package", autouse=True)
def saves_take_little_room() -> Iterator[None]:
    """An engine that saves in the background takes two pieces, of 32 MiB each for users."""
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, files, PIECE_BYTES=1 << 20)
        yield
