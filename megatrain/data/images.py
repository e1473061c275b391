"""Images, films and sounds of rows: reads their files, and calls the model's processor.

In a conversation a character of `PLACES` in a message's content marks the place of each medium.
A token store keeps the files, size and digest of each medium. Pixels and waves are decoded for each
micro-batch, from bytes whose digest is compared.
"""

import base64
import binascii
import copy
import hashlib
import io
import json
import re
import stat
import threading
import warnings
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import methodcaller
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from megatrain.compat.transformers import (
    decoder_of_films,
    film_of,
    has_decoder_of_sound,
    load_audio,
    types_tokens,
)
from megatrain.data.refused_fields import empty
from megatrain.errors import InputError, explained, in_one_line

PLACES = {"image": "\ufdd0", "video": "\ufdd1", "audio": "\ufdd2"}
"""The mark of each kind in a message's content; Unicode promises that no text has these."""
KINDS = {place: kind for kind, place in PLACES.items()}
PARTS = {
    **{name: kind for kind in PLACES for name in (kind, f"{kind}_url")}, "input_audio": "audio",
}  # fmt: skip
"""The kind of medium of each type of content part."""
MOST_PIXELS = 89_478_485  # Pillow warns of more: 256 MiB when decoded
_MOST_OF_FILMS = 1 << 31  # pixels of all frames that the model sees: 6 GiB when decoded
MOST_BYTES = 512 << 20  # of a file
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_SHAPES = 4096  # media whose tokens are remembered by their shape

Source = str | bytes | tuple[str | bytes, ...]  # a path or bytes; or those of a film's frames
Shape = tuple[str, tuple[int, ...], str, int]  # `kind`, `size`, `film`, `together` of a `Medium`


class MediumSource(NamedTuple):
    """A medium's place in a conversation; `source` None: the row's field has the medium."""

    kind: str
    source: Source | None


class Medium(NamedTuple):
    """An image, film or sound, as it is kept beside tokens."""

    path: str  # of the file, or of each frame, one a line; empty if the row itself has the bytes
    digest: str  # of the encoded bytes
    # width and height in pixels, after a film's number of frames; or a sound's samples
    size: tuple[int, ...]
    # size and time (ns) of each file; or the number of bytes of each frame in the row
    state: tuple[int, ...]
    data: bytes = b""  # the encoded bytes, unless they are in a file
    kind: str = "image"
    # the facts about a film's frames that the processor needs (rate, places), as JSON
    film: str = ""
    together: int = 1  # the number of images in the conversation, if an image's tokens depend on it

    @property
    def shape(self) -> Shape:
        """All that the number of the medium's tokens depends on."""
        return self.kind, self.size, self.film, self.together

    @property
    def name(self) -> str:
        """The kind, first file and size, for messages."""
        size = " x ".join(f"{number}" for number in self.size)
        size += " samples" if self.kind == "audio" else ""
        return f"{self.kind} {self.path.partition(chr(10))[0] or 'in the row'} ({size})"

    def changed(self) -> bool:
        """True if a file is missing, or has changed."""
        try:
            return bool(self.path) and _state(self.path.split("\n")) != self.state  # of each frame
        except OSError:
            return True

    def decoded(self, processor: "ImageProcessor") -> Any:
        """An upright RGB image, frames `[F, H, W, 3]` with facts, or a wave at the model's rate."""
        if self.path:
            data = [_read(path, path) for path in self.path.split("\n")]
        else:
            ends = [0, *accumulate(self.state or [len(self.data)])]
            data = [self.data[start:end] for start, end in pairwise(ends)]
        if _digest(b"".join(data)) != self.digest:
            raise InputError(
                f"{self.path or 'an image'}: the file has changed since the row was tokenised: "
                "restore the file, or start a new run"
            )
        return processor.decode(self.kind, data, self.path)


def sources(field: object, kind: str, where: str) -> list[Source]:
    """The sources of a row's field, which has one medium or a list of media."""
    values = field if isinstance(field, list) else [field]
    return [] if empty(field) else [_source(value, kind, where) for value in values]


def source_of(part: Mapping[str, Any], kind: str, where: str) -> Source | None:
    """The source that a content part names; None: the part stands for one of the row's field."""
    names = (kind, f"{kind}_url", "input_audio", "url", "path", "base64", "bytes")
    if isinstance(encoded := part.get("base64"), str):
        part = {**part, "base64": f"data:,{encoded.rpartition(',')[2]}"}
    values = [part[name] for name in names if not empty(part.get(name))]
    return _source(values[0], kind, where) if values else None


def _source(value: object, kind: str, where: str) -> Source:
    """The path, the paths of a film's frames, or the bytes of a medium."""
    if isinstance(value, Mapping):
        encoded = f"data:,{value['data']}" if value.get("data") else None  # OpenAI's input_audio
        value = encoded or value.get("bytes") or value.get("url") or value.get("path")
    if kind == "video" and isinstance(value, list):
        frames = [_source(frame, "image", where) for frame in value]
        if len({isinstance(frame, str) for frame in frames}) != 1:
            raise InputError(f"{where}: a film's frames are a list of files, or of bytes, not both")
        return (*frames,)  # type: ignore[arg-type]
    if isinstance(value, str) and value.startswith("data:"):
        with explained(f"{where}: an {kind}'s data: address is not base64", of=binascii.Error):
            value = base64.b64decode(value.partition(",")[2], validate=True)
    if not isinstance(value, str | bytes) or not value:
        raise InputError(
            f"{where}: an {kind} must be a path, a data: address or bytes, not "
            f"{type(value).__name__}: correct it"
        )
    path = value.removeprefix("file://") if isinstance(value, str) else ""
    if _ADDRESS.match(path):
        raise InputError(
            f"{where}: {kind} {path!r:.80} is an address: fetch it, and name the file (nothing is "
            "downloaded while training)"
        )
    return path or value


def place_media(
    turns: Sequence[dict[str, Any]], media: Mapping[str, list[Source]], where: str
) -> list[MediumSource]:
    """Mark the places of media in messages; returns their sources in the order of the marks.

    Args: `media`: kind -> sources of the row's field. These take the places of parts that name no
        source, or of `<image>`, `<video>` and `<audio>` in texts (LLaVA); without such places they
        come before the first question (TRL).
    """
    placed: list[MediumSource] = []
    for message in turns:
        in_parts = message.pop("media", [])
        if not in_parts and message["role"] != "assistant" and any(media.values()):
            content = message.get("content", "")
            for kind, field_sources in media.items():
                content = content.replace(f"<{kind}>", PLACES[kind]) if field_sources else content
            message["content"] = content
            in_parts = [MediumSource(KINDS[char], None) for char in content if char in KINDS]
        placed += in_parts
    question = next((message for message in turns if message["role"] == "user"), None)
    for kind, field_sources in media.items():
        number = len(field_sources)
        has_place = any(medium.kind == kind for medium in placed)
        if number and question is not None and not has_place:
            question["content"] = PLACES[kind] * number + question.get("content", "")
            placed += [MediumSource(kind, None)] * number
        if (num_places := placed.count(MediumSource(kind, None))) != number:
            raise InputError(
                f"{where}: {number} {kind}s in the row, and {num_places} places for them: "
                f"give each one place (<{kind}> in a question's text, or a part of the type {kind})"
            )
    unplaced = {kind: iter(field_sources) for kind, field_sources in media.items()}
    return [m._replace(source=m.source or next(unplaced[m.kind])) for m in placed]


def _state(paths: Sequence[str]) -> tuple[int, ...]:
    """Size and time (ns) of each file."""
    statuses = [Path(path).stat() for path in paths]
    return tuple(part for status in statuses for part in (status.st_size, status.st_mtime_ns))


def _read(path: str, name: str) -> bytes:
    remedy = "correct the path (relative to the data file's folder), or leave the row out"
    with explained(f"{name}: cannot be read", remedy, of=(OSError, ValueError)):
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            limit = MOST_BYTES >> 20
            raise InputError(f"{name}: not a plain file of at most {limit} MiB: leave the row out")
        return Path(path).read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _image(data: bytes) -> Image.Image:
    """A decoded image, as of transformers' `load_image`."""
    image = Image.open(io.BytesIO(data))
    if image.width * image.height > MOST_PIXELS:  # Pillow itself only refuses twice as many
        raise InputError(f"it has more than {MOST_PIXELS:,} pixels: make it smaller")
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise InputError("it has several frames: save the one to train on")
    if image.mode[0] in "IF":  # Pillow would make all values above 255 white
        raise InputError("its pixels have more than 8 bits: save it with 8")
    return ImageOps.exif_transpose(image).convert("RGB")


def _wave(data: bytes, rate: int) -> NDArray[np.float32]:
    """A sound `[samples]`, as transformers decodes it; plain .wav needs no package for that."""
    if has_decoder_of_sound():
        encoded = base64.b64encode(data).decode()
        sound = np.asarray(load_audio(f"data:;base64,{encoded}", sampling_rate=rate), np.float32)
        if not np.isfinite(sound).all():
            raise InputError("it has samples that are NaN or infinite")
        return sound
    with wave.open(io.BytesIO(data)) as file:
        form = file.getparams()
        encoded_samples = file.readframes(file.getnframes())
    if form.framerate != rate or form.sampwidth != 2:
        raise InputError(
            f"{form.framerate} Hz in {8 * form.sampwidth} bits: write it in {rate} Hz and 16 bits, "
            "or install torchcodec, or soundfile and soxr"
        )
    samples = np.frombuffer(encoded_samples, "<i2").reshape(-1, form.nchannels).astype(np.float32)
    return samples.mean(1) / np.float32(2**15)  # 16 bits become -1 to 1


class TextWithMedia(NamedTuple):
    """A text with all tokens of media, the end of the last medium's tokens in it, and `moved`.

    `moved` maps places in the chat template's text, which has one token of each, to this text.
    """

    text: str
    media_end: int = 0
    moved: Callable[[int], int] = lambda place: place


class ImageProcessor:
    """A model's processor: makes the tokens and tensors of images, films and sounds.

    The processor is loaded when it is first needed. Any thread may call it.
    """

    def __init__(self, folder: Path | None, *, trust_remote_code: bool = False) -> None:
        """Args: `folder`: of the model; None: the model has no processor."""
        self._folder, self._trusted = folder, trust_remote_code
        self._lock, self._local = threading.Lock(), threading.local()
        self._loaded: Any = None  # the processor that each thread copies
        self._longest_heard = 0  # samples of a sound that the processor is known not to cut
        self.replacement = lru_cache(_SHAPES)(self._replacement)

    @property
    def identity(self) -> list[str]:
        """The contents of the processor's files; none for a model of text."""
        paths = [] if self._folder is None else [self._folder / name for name in _FILES]
        return [path.read_text(errors="replace") for path in paths if path.is_file()]

    @property
    def digest(self) -> str:
        return _digest("".join(self.identity).encode())

    def load(self) -> None:
        """Load the processor, if there is one. Raises InputError: it cannot be used."""
        if self.identity:
            self._processor()

    @property
    def rate(self) -> int:
        """The rate (Hz) of the sounds that the model takes."""
        processor = self._processor()  # whose part for sounds has one of two names
        hearing = getattr(processor, "audio_processor", getattr(processor, "feature_extractor", 0))
        return int(getattr(hearing, "sampling_rate", 0))

    def token(self, kind: str) -> str:
        """The token with which chat templates mark a medium. Raises InputError: there is none."""
        if token := getattr(self._processor(), f"{kind}_token", None):
            return str(token)
        name = type(self._processor()).__name__
        raise InputError(f"a {name} has no place for {kind}s: leave them out")

    def film(self, data: Sequence[bytes]) -> Any:
        """The frames of a film that a model sees, and metadata; `data`: the film, or each frame."""
        if len(data) > 1:
            frames = np.stack([np.asarray(_image(frame)) for frame in data])
            return film_of(self._processor(), frames, _refuse_large)
        if decoder_of_films() is None:
            raise InputError(
                "no decoder of films is installed: pip install torchcodec (or av), or name the "
                "files of its frames in a list, as ffmpeg -i FILM -vf fps=2 %04d.png makes them"
            )
        with NamedTemporaryFile() as file:
            file.write(data[0])
            file.flush()
            return film_of(self._processor(), file.name, _refuse_large)

    def read(self, sources: Sequence[MediumSource], folder: Path, where: str) -> list[Medium]:
        """A conversation's media, each as `_read_medium` reads it."""
        media = [self._read_medium(source, folder, where) for source in sources]
        count = sum(medium.kind == "image" for medium in media)
        processor = getattr(self._processor(), "image_processor", None) if count > 1 else None
        if "batch_num_images" not in getattr(processor, "model_input_names", ()):
            return media
        # An image's tokens depend on the number of images beside it (LLaVA-OneVision).
        return [medium._replace(together=count) for medium in media]

    def _read_medium(self, medium: MediumSource, folder: Path, where: str) -> Medium:
        """A medium, decoded once to check it. Raises InputError: it is broken, or not supported."""
        kind, source = medium
        with explained(where, of=InputError):
            self.token(kind)
        parts = source if isinstance(source, tuple) else (source,)
        paths = [str(folder / Path(part).expanduser()) for part in parts if isinstance(part, str)]
        if paths:
            name = f"{where}: {kind} {paths[0]}"
            encoded = [_read(path, f"{where}: {kind} {path}") for path in paths]
            state = _state(paths)
        else:
            name = f"{where}: the {kind} in the row"
            encoded = [part for part in parts if isinstance(part, bytes)]
            state = tuple(map(len, encoded)) if len(encoded) > 1 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes and of palettes
            decoded = self.decode(kind, encoded, name)
        film = ""
        if kind == "video":
            frames, facts = decoded
            size = len(frames), frames.shape[2], frames.shape[1]
            film = json.dumps(facts, default=methodcaller("tolist"))
        else:
            size = tuple(decoded.size if kind == "image" else decoded.shape)
        data = b"".join(encoded)
        row_data = b"" if paths else data
        return Medium("\n".join(paths), _digest(data), size, state, row_data, kind, film)

    def decode(self, kind: str, data: Sequence[bytes], name: str) -> Any:
        """A medium in the form of `Medium.decoded`. Raises InputError: broken, or too large."""
        try:
            if kind == "audio":
                return _wave(data[0], self.rate)
            return _image(data[0]) if kind == "image" else self.film(data)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        except Exception as error:  # decoders raise errors of many types
            reason = in_one_line(error).partition(" <")[0]
            raise InputError(
                f"{name}: not a whole {kind}: {reason}: replace it, or leave the row out"
            ) from error

    def place(self, text: str, media: Sequence[Medium], where: str) -> TextWithMedia:
        """A chat template's text with the tokens of media in place of their marks.

        Raises InputError: the text has not one mark for each medium.
        """
        if not media:
            return TextWithMedia(text)
        by_mark: dict[str, list[str]] = {}  # the tokens of each medium, by the mark of its kind
        with explained(where):
            for medium in media:
                mark = self.token(medium.kind)
                by_mark.setdefault(mark, []).append(self.replacement(*medium.shape))
        matches = [*re.finditer("|".join(map(re.escape, by_mark)), text)]
        for mark, parts in by_mark.items():
            number = sum(match[0] == mark for match in matches)
            if number != len(parts):
                kind = next(medium.kind for medium in media if self.token(medium.kind) == mark)
                raise InputError(
                    f"{where}: the chat template's text has {number} places of {kind}s "
                    f"({mark!r}), and the row {len(parts)} {kind}s: use a template with a place "
                    "for each"
                )
        unplaced = {mark: iter(parts) for mark, parts in by_mark.items()}
        parts = [next(unplaced[match[0]]) for match in matches]
        places = [match.start() for match in matches]
        growths = (len(part) - len(match[0]) for part, match in zip(parts, matches, strict=True))
        shifts = np.cumsum([0, *growths]).tolist()  # of a place after so many marks

        def moved(place: int) -> int:
            return place + int(shifts[int(np.searchsorted(places, place))])

        part = iter(parts)
        expanded = re.sub("|".join(map(re.escape, by_mark)), lambda _: next(part), text)
        return TextWithMedia(expanded, moved(places[-1]) + len(parts[-1]), moved)

    def _replacement(
        self, kind: str, size: tuple[int, ...], film: str = "", together: int = 1
    ) -> str:
        """The text of all tokens that stand for a medium (`Medium.shape`)."""
        count = together if kind == "image" else 1
        blank = {kind: [[_blank(kind, size, film)] * count]}
        problem = f"the model's processor takes no {kind} of {' x '.join(map(str, size))}"
        with explained(problem, "give it another size, or leave the row out"):
            processed = self._processed(blank, 1, return_text_replacement_offsets=True)
        text = str(processed["text_replacement_offsets"][0][0]["replacement"])
        if kind == "audio" and self.token(kind) not in text:
            raise InputError(
                f"a sound of {size[0]} samples, of which the model's processor makes no token: "
                "leave it out"
            )
        if kind == "audio" and not self._hears_end(size[0]):
            raise InputError(
                f"a sound of {size[0] / self.rate:.1f} seconds, whose end the model does not hear: "
                "cut it"
            )
        return text

    def _hears_end(self, samples: int) -> bool:
        """True if the processor's tensors depend on the last 50 ms of a sound."""
        if samples <= self._longest_heard:
            return True
        silence = np.zeros(samples, np.float32)
        noise = np.random.default_rng(0).normal(size=max(1, self.rate // 20))
        sound = np.concatenate((silence, noise.astype(np.float32)))[-samples:]
        quiet, loud = (self._processed({"audio": [[wave]]}, 1) for wave in (silence, sound))
        differs = any(not torch.equal(loud[name], value) for name, value in quiet.items())
        self._longest_heard = samples if differs else self._longest_heard
        return differs

    def inputs(self, ids: Any, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        """The processor's tensors of rows' media, and the type of each of the tokens `[B, T]`."""
        processor = self._processor()
        types: dict[str, Tensor] = {}
        if types_tokens(processor):
            types_BT = torch.tensor(processor.create_mm_token_type_ids(ids))
            types = dict.fromkeys(self._type_names, types_BT)
        rows = [row for row in rows if row]
        if not rows:
            return types
        kinds = {medium.kind for row in rows for medium in row}
        decoded: dict[str, list[list[Any]]] = {kind: [] for kind in kinds}
        for row in rows:
            for kind, media_by_row in decoded.items():
                media_by_row.append([medium.decoded(self) for medium in row if medium.kind == kind])
        text_names = ("input_ids", "attention_mask")
        return types | {
            name: value
            for name, value in self._processed(decoded, len(rows)).items()
            if name not in text_names and not name.endswith("token_type_ids")
        }

    def example(self, shapes: Sequence[Shape]) -> dict[str, Tensor]:
        """All tensors of a row that has nothing but blank media of these shapes."""
        blank: dict[str, list[list[Any]]] = {}  # one row of each kind
        for kind, size, film, _ in shapes:
            blank.setdefault(kind, [[]])[0].append(_blank(kind, size, film))
        return dict(self._processed(blank, 1))

    def _processed(self, media: Mapping[str, list[list[Any]]], rows: int, **options: Any) -> Any:
        """The processor's result for `rows` rows of `media`, given by kind and row."""
        text = [""] * rows
        inputs: dict[str, Any] = {}
        for kind, by_row in media.items():
            mark = self.token(kind)
            text = [row + mark * len(in_row) for row, in_row in zip(text, by_row, strict=True)]
            flat = [medium for in_row in by_row for medium in in_row]
            if kind == "video":
                flat, facts = map(list, zip(*flat, strict=True))
                if all(facts):
                    inputs["videos_kwargs"] = {"video_metadata": facts, "do_sample_frames": False}
            inputs |= {"images": by_row} if kind == "image" else {_ARGUMENTS[kind]: flat}
        if "audio" in inputs:
            inputs["audio_kwargs"] = {"sampling_rate": self.rate}
        options = options or {"padding": True, "return_tensors": "pt"}
        return self._processor()(text=text, **inputs, **options)

    def _processor(self) -> Any:
        """This thread's copy of the processor: its tokenizer serves one thread at a time."""
        if not hasattr(self._local, "processor"):
            with self._lock:
                self._loaded = self._loaded or self._load()
                self._local.processor = copy.deepcopy(self._loaded)
        return self._local.processor

    def _load(self) -> Any:
        from transformers import AutoProcessor

        with explained(f"{self._folder}: cannot load its processor"):  # or packages that it needs
            processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=self._trusted)
        if not hasattr(processor, "get_text_with_replacements"):
            raise InputError(
                f"{self._folder}: this version of transformers does not tell the tokens of "
                "an image or a sound; install a newer one (5.17 does)"
            )
        if types_tokens(processor):
            named = processor(text=["a"]).keys()
            self._type_names = [name for name in named if name.endswith("token_type_ids")]
        return processor


_ARGUMENTS = {"video": "videos", "audio": "audio"}  # of a processor, for media of these kinds


def _refuse_large(frames: int, film: Any) -> None:
    if frames * (film.width or 1) * (film.height or 1) > _MOST_OF_FILMS:
        raise InputError(
            f"the model would see {frames:,} frames of {film.width} x {film.height}, more than "
            f"{_MOST_OF_FILMS:,} pixels: make it shorter or smaller"
        )


def _blank(kind: str, size: tuple[int, ...], film_metadata: str = "") -> Any:
    """A medium of zeros; `size`: width and height, samples, or frames, width and height."""
    if kind == "image":
        return Image.new("RGB", (size[0], size[1]))
    if kind == "audio":
        return np.zeros(size, np.float32)
    return np.zeros((size[0], size[2], size[1], 3), np.uint8), json.loads(film_metadata or "{}")
