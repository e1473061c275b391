"""Images of rows: their files, checked; the tokens and the tensors that a processor makes of them.

In a conversation an image is a character, `IMAGE`, in a message's content, and an entry of the
row's images. Kept tokens name each image's file, size and digest; pixels are made anew for each
micro-batch, from bytes with the same digest.
"""

import base64
import binascii
import copy
import hashlib
import io
import re
import stat
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from megatrain.data.refused_fields import empty
from megatrain.errors import InputError, in_one_line

IMAGE = "\ufdd0"  # in place of an image in a message's content: no character, so in no text
MOST_PIXELS = 89_478_485  # as Pillow warns of: 256 MiB when decoded
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_SIZES = 4096  # whose tokens are remembered


class Picture(NamedTuple):
    """An image as kept tokens know it.

    Attributes:
        path: of its file; empty if the row itself holds the bytes.
        digest: of its encoded bytes.
        size: width and height in pixels.
        state: size and time (ns) of the file.
        data: the encoded bytes, unless they are in a file.
    """

    path: str
    digest: str
    size: tuple[int, int]
    state: tuple[int, int]
    data: bytes = b""

    @property
    def name(self) -> str:
        """Its file, size and name in messages."""
        return f"{self.path or 'in the row'} ({self.size[0]} x {self.size[1]})"

    def changed(self) -> bool:
        """True if its file is missing, or not as it was."""
        try:
            return bool(self.path) and _state(Path(self.path)) != self.state
        except OSError:
            return True

    def decoded(self) -> Image.Image:
        """Its pixels, upright, as RGB. Raises InputError: the file has changed."""
        data = self.data or _read(self.path, self.path)
        if _digest(data) != self.digest:
            raise InputError(
                f"{self.path or 'an image'}: not as it was when its row was made tokens: restore "
                "it, or start a new run"
            )
        return _decoded(data, self.path)


def sources(value: object, where: str) -> list[object]:
    """The images of a row's field: one, or a list."""
    images = value if isinstance(value, list) else [value]
    return [] if empty(value) else [_source(image, where) for image in images]


def source_of(part: Mapping[str, Any], where: str) -> object:
    """The image that a content part names; None: it takes the next of the row's own field."""
    names = ("image", "image_url", "url", "path", "base64", "bytes")
    values = [part[name] for name in names if not empty(part.get(name))]
    return _source(values[0], where) if values else None


def _source(value: object, where: str) -> object:
    """The path or the bytes of an image."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise InputError(f"{where}: an image's data: address is not base64: {error}") from error
    if not isinstance(value, str | bytes) or not value:
        raise InputError(
            f"{where}: an image must be a path, a data: address or bytes, not "
            f"{type(value).__name__}: correct it"
        )
    path = value.removeprefix("file://") if isinstance(value, str) else ""
    if _ADDRESS.match(path):
        raise InputError(
            f"{where}: image {path!r:.80} is an address: fetch it, and name the file (nothing is "
            "downloaded while training)"
        )
    return path or value


def place_images(turns: Sequence[dict[str, Any]], images: list[object], where: str) -> list[object]:
    """Put `IMAGE` where images are; returns the images in this order.

    The row's own images take the places of parts that name none, or of `<image>` in texts (LLaVA);
    where there are no such places, they come before the first question (TRL).
    """
    placed: list[object] = []
    for message in turns:
        in_parts, content = message.pop("images", []), message.get("content", "")
        if images and not in_parts and message["role"] != "assistant":
            in_parts = [None] * content.count("<image>")
            message["content"] = content.replace("<image>", IMAGE)
        placed += in_parts
    asked = next((message for message in turns if message["role"] == "user"), None)
    if images and not placed and asked is not None:
        asked["content"] = IMAGE * len(images) + asked.get("content", "")
        placed = [None] * len(images)
    if placed.count(None) != len(images):
        raise InputError(
            f"{where}: {len(images)} images in the row, and {placed.count(None)} places for them "
            "(<image> in a question's text, or parts of the type image): give each image one place"
        )
    rest = iter(images)
    return [next(rest) if image is None else image for image in placed]


def read_picture(source: object, folder: Path, where: str) -> Picture:
    """An image, read and decoded once. Raises InputError: it is none, or cannot be trained on."""
    if isinstance(source, bytes):
        path, data, state = "", source, (len(source), 0)
        name = f"{where}: the image in the row"
    else:
        path = str(folder / Path(str(source)).expanduser())
        name = f"{where}: image {path}"
        data = _read(path, name)
        state = _state(Path(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of sizes and of palettes
        image = _decoded(data, name)
    kept = b"" if path else data
    return Picture(path, _digest(data), image.size, state, kept)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _read(path: str, name: str) -> bytes:
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise InputError(f"{name}: not a plain file: name one, or leave the row out")
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{name}: cannot be read: {reason.lower()} (paths are relative to the data file's "
            "folder): correct the path, or leave the row out"
        ) from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _decoded(data: bytes, name: str) -> Image.Image:
    """As transformers' `load_image` decodes. Raises InputError: it is broken, moves, or is huge."""
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise InputError(f"{name}: it has several frames: save the one to train on")
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise InputError(
            f"{name}: it has more than {MOST_PIXELS:,} pixels: make it smaller, or leave the row "
            "out"
        ) from error
    except InputError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types
        reason = in_one_line(error).partition(" <")[0]
        raise InputError(
            f"{name}: not a whole image: {reason}: replace it, or leave the row out"
        ) from error


class ImageProcessor:
    """A model's processor: the text in place of images, and their tensors.

    It is loaded when the first image comes. Any thread may call it.
    """

    def __init__(self, folder: Path | None, *, trust_remote_code: bool = False) -> None:
        """Args: `folder`: of the model; None: it has none."""
        self._folder, self._trusted = folder, trust_remote_code
        self._lock, self._of_thread = threading.Lock(), threading.local()
        self._loaded: Any = None
        self._replacement = lru_cache(_SIZES)(self._replacement_of)

    @property
    def identity(self) -> list[str]:
        """The contents of its files; none for a model of text."""
        paths = [] if self._folder is None else [self._folder / name for name in _FILES]
        return [path.read_text(errors="replace") for path in paths if path.is_file()]

    @property
    def digest(self) -> str:
        """Of the contents of its files."""
        return _digest("".join(self.identity).encode())

    def load(self) -> None:
        """Load the processor, if there is one. Raises InputError: it cannot be used."""
        if self.identity:
            self._processor()

    @property
    def token(self) -> str:
        """What stands for an image in a chat template's text."""
        return str(self._processor().image_token)

    def replacement(self, size: tuple[int, int]) -> str:
        """The text in place of an image, which follows from its width and height alone."""
        return self._replacement(size)

    def _replacement_of(self, size: tuple[int, int]) -> str:
        processor = self._processor()
        processed = processor(
            images=[[Image.new("RGB", size)]],
            text=[processor.image_token],
            return_text_replacement_offsets=True,
        )
        return str(processed["text_replacement_offsets"][0][0]["replacement"])

    def token_types(self, ids: list[list[int]]) -> dict[str, Tensor]:
        """The type of each token `[B, T]`, 0 for text, 1 for an image, by the model's names."""
        processor = self._processor()
        if not processor.return_mm_token_type_ids:
            return {}
        types = torch.tensor(processor.create_mm_token_type_ids(ids))
        return dict.fromkeys(self._type_names, types)

    def tensors(self, rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
        """The tensors of images of the rows that have some, as the processor makes them."""
        rows = [row for row in rows if row]
        if not rows:
            return {}
        processed = self._processed([[picture.decoded() for picture in row] for row in rows])
        of_text = ("input_ids", "attention_mask")
        return {
            name: value
            for name, value in processed.items()
            if name not in of_text and not name.endswith("token_type_ids")
        }

    def example(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """All tensors of a row that is nothing but blank images, of these widths and heights."""
        return dict(self._processed([[Image.new("RGB", size) for size in sizes]]))

    def _processed(self, rows: list[list[Image.Image]]) -> Any:
        processor = self._processor()
        text = [processor.image_token * len(row) for row in rows]
        return processor(images=rows, text=text, padding=True, return_tensors="pt")

    def inputs(self, ids: Any, rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
        """The tensors of rows of tokens `[B, T]` with images, beside those of their text."""
        return self.token_types(ids) | self.tensors(rows)

    def _processor(self) -> Any:
        """This thread's copy: tokenizers are not for several threads."""
        if not hasattr(self._of_thread, "processor"):
            with self._lock:
                self._loaded = self._loaded or self._load()
                self._of_thread.processor = copy.deepcopy(self._loaded)
        return self._of_thread.processor

    def _load(self) -> Any:
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=self._trusted)
        except Exception as error:  # of files, of packages that are not installed
            reason = in_one_line(error, 300)
            raise InputError(f"{self._folder}: cannot load its processor: {reason}") from error
        if not (getattr(processor, "image_token", None) and hasattr(processor, "image_processor")):
            kind = type(processor).__name__
            raise InputError(f"{self._folder}: a {kind} has no place for images: leave them out")
        if processor.return_mm_token_type_ids:
            named = processor(text=["a"]).keys()
            self._type_names = [name for name in named if name.endswith("token_type_ids")]
        return processor


def with_images(
    text: str, images: Sequence[Picture], processor: ImageProcessor | None, where: str
) -> tuple[str, Callable[[int], int], int]:
    """A chat template's text with images' tokens, where a place in it has moved, and an end.

    That is the end of the last image's tokens in the new text.

    Raises InputError: the text has not one place for each image.
    """
    if not images or processor is None:
        return text, lambda place: place, 0
    try:
        token = processor.token
        parts = [processor.replacement(image.size) for image in images]
    except Exception as error:
        raise InputError(f"{where}: {in_one_line(error, 300)}") from error
    places = [match.start() for match in re.finditer(re.escape(token), text)]
    if len(places) != len(images):
        raise InputError(
            f"{where}: the chat template's text has {len(places)} places of images ({token!r}), "
            f"and the row {len(images)} images: use a template that has a place for each, and "
            "leave such words out of the text"
        )
    grown = np.cumsum([0, *(len(part) - len(token) for part in parts)]).tolist()
    filler = iter(parts)

    def moved(place: int) -> int:
        return place + int(grown[int(np.searchsorted(places, place))])

    expanded = re.sub(re.escape(token), lambda _: next(filler), text)
    return expanded, moved, moved(places[-1]) + len(parts[-1])
