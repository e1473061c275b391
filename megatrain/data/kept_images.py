"""The images of kept tokens: for each document a line of JSON, and bytes that no file holds."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatrain.data.images import Picture
from megatrain.data.kept_file import KeptFile

_FILE, _PLACES = "images.bin", "image_places.bin"


class ImageWriter:
    """Writes the images of documents, one document after the other; no files if there are none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends = [0]

    def add(self, images: Sequence[Picture], end: int) -> bytes:
        """Write a document's images, of which the last's tokens end at `end`; what tells them."""
        if not images:
            self._ends.append(self._ends[-1])
            return b""
        line = json.dumps([end, [[*image[:-1], len(image.data)] for image in images]])
        data = line.encode() + b"\n" + b"".join(image.data for image in images)
        with (self._folder / _FILE).open("ab") as file:
            file.write(data)
        self._ends.append(self._ends[-1] + len(data))
        return "".join(image.digest for image in images).encode()

    def finish(self) -> None:
        """Write where each document's images begin, if there are any."""
        if self._ends[-1]:
            np.array(self._ends, "<i8").tofile(self._folder / _PLACES)


class KeptImages:
    """Reads the images of documents."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError: the files cannot be read."""
        self._ends = np.fromfile(folder / _PLACES, "<i8")
        self._file = KeptFile(folder / _FILE)

    @staticmethod
    def of_store(folder: Path) -> "KeptImages | None":
        """The images of a store's folder; None: it has none. Raises OSError."""
        return KeptImages(folder) if (folder / _PLACES).is_file() else None

    def end(self, document: int) -> int:
        """Tokens of a document up to, with, the last one of its last image; 0: it has none."""
        return self._read(document)[0]

    def of(self, document: int) -> list[Picture]:
        """The images of a document."""
        return self._read(document)[1]

    def _read(self, document: int) -> tuple[int, list[Picture]]:
        begin, stop = self._ends[document : document + 2].tolist()
        if begin == stop:
            return 0, []
        line, _, data = bytes(self._file.read(begin, stop - begin)).partition(b"\n")
        end, entries = json.loads(line)
        images, at = [], 0
        for path, digest, size, state, length in entries:
            images.append(Picture(path, digest, (*size,), (*state,), data[at : at + length]))
            at += length
        return end, images

    def changed(self) -> str | None:
        """The path of an image whose file is missing, or not as it was."""
        documents = np.flatnonzero(np.diff(self._ends)).tolist()
        images = (image for document in documents for image in self.of(document))
        return next((image.path for image in images if image.changed()), None)
