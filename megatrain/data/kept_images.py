"""The images of kept tokens: for each document a line of JSON, and bytes that no file holds.

`image_places.bin` has where each line begins, and the checksums of the lines' blocks; bytes have
digests in their lines.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatrain.data.images import Medium
from megatrain.data.kept_file import BlockSums, KeptFile

_LINES, PLACES_FILE, _BYTES = "images.jsonl", "image_places.bin", "image_bytes.bin"


class ImageWriter:
    """Writes the images of documents, one document after the other; no files if there are none."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._sums = folder, BlockSums()
        self._ends, self._num_bytes = [0], 0

    def add(self, images: Sequence[Medium], end: int) -> bytes:
        """Write a document's images, of which the last's tokens end at `end`.

        Returns bytes that differ where the images do.
        """
        line, data = b"", b"".join(image.data for image in images)
        if images:
            entries = [[*m[:4], len(m.data), m.kind] for m in images]
            line = json.dumps([end, self._num_bytes, entries]).encode() + b"\n"
            for name, content in ((_LINES, line), (_BYTES, data)):
                with (self._folder / name).open("ab") as file:
                    file.write(content)
        self._sums.add(line)
        self._num_bytes += len(data)
        self._ends.append(self._ends[-1] + len(line))
        return "".join(image.digest for image in images).encode()

    def finish(self) -> dict[str, int]:
        """Write where each document's line begins; returns `images`: that file's checksum."""
        if not self._ends[-1]:
            return {}
        places = np.array(self._ends, "<i8").tobytes() + self._sums.to_bytes()
        (self._folder / PLACES_FILE).write_bytes(places)
        return {"images": zlib.crc32(places)}


class KeptImages:
    """Reads the images of documents."""

    def __init__(self, folder: Path, num_documents: int, checksum: int) -> None:
        """Args: `checksum`: of `ImageWriter.finish`. Raises OSError, ValueError: damaged."""
        places = (folder / PLACES_FILE).read_bytes()
        if zlib.crc32(places) != checksum:
            raise ValueError(f"{PLACES_FILE} is not as it was written")
        self._ends = np.frombuffer(places, "<i8", num_documents + 1)
        self._lines = KeptFile(folder / _LINES, BlockSums(places[self._ends.nbytes :]))
        self._bytes = KeptFile(folder / _BYTES)

    def end(self, document: int) -> int:
        """Tokens of a document up to, with, the last one of its last image; 0: it has none."""
        return int(self._line(document)[0])

    def of(self, document: int, *, whole: bool = True) -> list[Medium]:
        """The images of a document; not `whole`: without bytes that no file holds."""
        _, at, entries = self._line(document)
        images = []
        for path, digest, size, state, length, *kind in entries:
            data = bytes(self._bytes.read(at, length)) if whole and length else b""
            images.append(Medium(path, digest, (*size,), (*state,), data, *kind))
            at += length
        return images

    def changed(self) -> str | None:
        """The path of an image whose file is missing, or not as it was."""
        documents = np.flatnonzero(np.diff(self._ends)).tolist()
        images = (image for document in documents for image in self.of(document, whole=False))
        return next((image.path for image in images if image.changed()), None)

    def _line(self, document: int) -> tuple[int, int, list[list]]:
        begin, stop = self._ends[document : document + 2].tolist()
        if begin == stop:
            return 0, 0, []
        end, at, entries = json.loads(bytes(self._lines.read(begin, stop - begin)))
        return end, at, entries
