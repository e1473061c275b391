"""Tiny multimodal models of every family, and micro-batches in the shapes of their processors."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from megatrain.compat.transformers import MULTIMODAL_CLASSES, encoder_calls
from tests.families.plain import Step

TOKENS = {"image": "image_token", "video": "video_token", "audio": "audio_token"}


def families() -> list[str]:
    """Model types of all multimodal families, in the order of transformers' mapping."""
    return list(MULTIMODAL_CLASSES)


@dataclass
class Medium:
    """Images, videos or sounds of a micro-batch, the same number in each row.

    Attributes:
        kind: "image", "video" or "audio".
        tensors: arguments of the model's forward.
        areas: how large each one of a row is, in proportion; placeholders follow it.
    """

    kind: str
    tensors: dict[str, Tensor]
    areas: list[int] = field(default_factory=lambda: [1])


Make = Callable[[PreTrainedModel, int, torch.Generator], Iterator[Medium]]


def media_steps(model: PreTrainedModel, family: str) -> list[Step]:
    """Three steps: media and text, text alone, text and one kind of media.

    Micro-batches differ in rows and tokens.
    """
    generator = torch.Generator().manual_seed(0)
    every = FORMATS.get(family) or image_format(model)

    def one_kind(*args: Any) -> Iterator[Medium]:
        return islice(every(*args), 1)

    steps: list[list[tuple[int, Make]]] = [
        [(2, every), (3, _nothing), (1, every)],
        [(1, _nothing), (2, _nothing)],
        [(2, _nothing), (2, one_kind)],
    ]
    return [[micro_batch(model, make, rows, generator) for rows, make in step] for step in steps]


def micro_batch(
    model: PreTrainedModel, make: Make, rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Rows of text around the placeholders of media; only text has labels."""
    parts, kinds, tensors = [_text(model, rows, 4, generator)], [torch.zeros(rows, 4)], {}
    for number, medium in enumerate(make(model, rows, generator)):
        tensors |= medium.tensors
        for ids in _placeholders(model, medium, rows):
            of_medium = torch.full(ids.shape, 1 + [*TOKENS].index(medium.kind))
            around = _text(model, rows, 2 + number, generator)
            parts += [ids, around]
            kinds += [of_medium * (ids == ids[0, len(ids[0]) // 2]), torch.zeros(around.shape)]
    parts.append(_text(model, rows, 5 + rows, generator))
    kinds.append(torch.zeros(parts[-1].shape))
    ids, types = torch.cat(parts, 1), torch.cat(kinds, 1).long()
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids > _last_text(model), -100), **tensors}
    takes = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = types
    if "token_type_ids" in takes:
        batch["token_type_ids"] = types.clamp(max=1)
    return batch


def _last_text(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size - 11


def _text(model: PreTrainedModel, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(10, _last_text(model), (rows, tokens), generator=generator)


def _placeholders(model: PreTrainedModel, medium: Medium, rows: int) -> Iterator[Tensor]:
    """The placeholders `[rows, tokens]` of each of a row's media, as many as it has features."""
    features = _features(copy.deepcopy(model), medium) // rows
    for area in medium.areas:
        count, rest = divmod(features * area, sum(medium.areas))
        assert not rest, (features, medium.areas)
        ids = [token(model, medium.kind)] * count
        first, last = (_named(model, name) for name in ("vision_start_token", "vision_end_token"))
        if None not in (first, last) and medium.kind != "audio":
            ids = [first, *ids, last]
        yield torch.tensor(ids).expand(rows, -1)


def token(model: PreTrainedModel, kind: str) -> int:
    found = _named(model, TOKENS[kind])
    assert found is not None, f"no {kind} token"
    return found


def _named(model: PreTrainedModel, name: str) -> Any:
    configs = (model.config, getattr(model.config, "vision_config", None))
    values = [getattr(c, f"{name}_{end}", None) for c in configs for end in ("id", "index")]
    return next((value for value in values if value is not None), None)


def _features(model: PreTrainedModel, medium: Medium) -> int:
    """How many tokens the encoder makes of a medium."""
    name = f"get_{medium.kind}_features"
    encoders = [module for module, method in encoder_calls(model) if method == name]
    if not encoders:
        return COUNTS[model.config.model_type](model, medium)
    takes = inspect.signature(getattr(encoders[-1], name)).parameters
    with torch.no_grad():
        arguments = {key: value for key, value in medium.tensors.items() if key in takes}
        result = getattr(encoders[-1], name)(**arguments)
    pooled = getattr(result, "pooler_output", result)
    pooled = result.last_hidden_state if pooled is None else pooled
    leaves = [leaf for leaf in pytree.tree_leaves(pooled) if isinstance(leaf, Tensor)]
    hidden = model.config.get_text_config(decoder=True).hidden_size
    return sum(leaf.numel() for leaf in leaves) // hidden


def _nothing(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    return iter(())


def _tower(model: PreTrainedModel) -> Any:
    """The configuration that says how large an image is."""
    config = getattr(model.config, "vision_config", model.config)
    return getattr(config, "sam_config", config)


def _first(config: Any, *names: str, default: int = 3) -> int:
    value = next((v for n in names if (v := getattr(config, n, None)) is not None), default)
    return value[0] if isinstance(value, list | tuple) else value


def pictures(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """One square image in each row: pixels `[rows, channels, size, size]`."""
    tower = _tower(model)
    size = _first(tower, "image_size")
    channels = _first(tower, "num_channels", "in_channels", "in_chans")
    pixels = torch.randn(rows, channels, size, size, generator=generator)
    yield Medium("image", {"pixel_values": pixels})


def pooled(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image in each row as one crop of 16 patches, of which each of 4 tokens pools 4."""
    pixels = torch.randn(rows, 16, 3 * 4 * 4, generator=generator)
    places = torch.arange(rows * 16).view(rows * 4, 4)
    grid = torch.tensor([[1, 2, 1, 2]] * rows)
    tensors = {"pixel_values": pixels, "image_token_pooling": places, "image_grids": grid}
    yield Medium("image", tensors)


def grids(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Two images of two sizes in each row, and a video: `[patches, values]`, and their grids."""
    sizes = [("image", "pixel_values", "image_grid_thw", [[1, 4, 4], [1, 4, 8]])]
    if "pixel_values_videos" in inspect.signature(model.forward).parameters:
        sizes.append(("video", "pixel_values_videos", "video_grid_thw", [[1, 4, 4]]))
    tower = _tower(model)
    patch = (
        _first(tower, "in_channels", "in_chans", "num_channels")
        * _first(tower, "temporal_patch_size", "patch_temporal", default=1)
        * _first(tower, "patch_size") ** 2
    )
    for kind, values, shape, grid in sizes:
        every = torch.tensor(grid * rows)
        pixels = torch.randn(int(every.prod(1).sum()), patch, generator=generator)
        yield Medium(kind, {values: pixels, shape: every}, [prod(g) for g in grid])


def sized(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """A padded image in each row, and its size without the padding."""
    [medium] = pictures(model, rows, generator)
    size = medium.tensors["pixel_values"].shape[-1]
    medium.tensors["image_sizes"] = torch.tensor([[size, size // 2]] * rows)
    yield medium


def tiles(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Each row's image cut into two tiles: `[rows, tiles, channels, size, size]`."""
    [medium] = pictures(model, 2 * rows, generator)
    pixels = medium.tensors["pixel_values"]
    masks = torch.ones(rows, 2, *pixels.shape[-2:], dtype=torch.long)
    shaped = {"pixel_values": pixels.unflatten(0, (rows, 2)), "pixel_attention_mask": masks}
    yield Medium("image", shaped, [1, 1])


def masked(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """As `tiles`, with a mask of whole tiles."""
    [medium] = tiles(model, rows, generator)
    medium.tensors["pixel_attention_mask"] = torch.ones(rows, 2, dtype=torch.bool)
    yield medium


def cropped(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Each row's image as a small whole and two crops, and the size it had."""
    [medium] = pictures(model, 3 * rows, generator)
    pixels = medium.tensors["pixel_values"]
    size = pixels.shape[-1]
    sizes = torch.tensor([[size, 2 * size]] * rows)
    tensors = {"pixel_values": pixels.unflatten(0, (rows, 3)), "image_sizes": sizes}
    yield Medium("image", tensors)


def hybrid(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image in each row in two resolutions."""
    [medium] = pictures(model, rows, generator)
    size = model.config.high_res_vision_config.image_size
    high = torch.randn(rows, 3, size, size, generator=generator)
    yield Medium("image", medium.tensors | {"high_res_pixel_values": high})


def strips(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Images of two sizes in each row, their patches in one strip, and their sizes in patches."""
    tower, sizes = _tower(model), [[4, 4], [4, 8]]
    width = tower.patch_size * rows * sum(map(prod, sizes))
    pixels = torch.randn(1, tower.num_channels, tower.patch_size, width, generator=generator)
    tensors = {"pixel_values": pixels, "target_sizes": torch.tensor(sizes * rows)}
    yield Medium("image", tensors, [*map(prod, sizes)])


def stacked(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Two images of two sizes in each row: patches `[patches, channels, size, size]`, and grids."""
    for medium in grids(model, rows, generator):
        name, patch = next(iter(medium.tensors)), _tower(model).patch_size
        medium.tensors[name] = medium.tensors[name].unflatten(1, (-1, patch, patch))
        yield medium


def stills(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """As `grids`, without a video."""
    yield next(grids(model, rows, generator))


def placed(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image in each row: patches `[rows, patches, values]`, and where they are."""
    size = _first(_tower(model), "model_patch_size", "patch_size")
    pixels = torch.rand(rows, 16, 3 * size**2, generator=generator)
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(rows, -1, -1)
    yield Medium("image", {"pixel_values": pixels, "image_position_ids": places.clone()})


def gridded(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Two images of two sizes in each row, their grids without times."""
    medium = next(grids(model, rows, generator))
    grid = medium.tensors.pop("image_grid_thw")[:, 1:].contiguous()
    yield Medium("image", medium.tensors | {"image_grid_hw": grid}, medium.areas)


def patched(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image of 16 patches in each row: `[rows, patches, values]`."""
    config = model.config
    pixels = torch.randn(rows, 16, config.num_channels * config.patch_size**2, generator=generator)
    yield Medium("image", {"pixel_values": pixels})


def spatial(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image of 16 patches in each row, with its shape in patches and a mask."""
    tower = _tower(model)
    pixels = torch.randn(rows, 16, tower.num_channels * tower.patch_size**2, generator=generator)
    shapes = {"spatial_shapes": torch.tensor([[4, 4]] * rows)}
    mask = {"pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long)}
    yield Medium("image", {"pixel_values": pixels, **shapes, **mask})


def merged(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """As `grids`, with how many patches of each side become one token."""
    for medium in grids(model, rows, generator):
        count = len(medium.tensors[f"{medium.kind}_grid_thw"])
        medium.tensors[f"{medium.kind}_merge_sizes"] = torch.full((count,), 2)
        yield medium


def crossed(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """An image of one tile in each row, for layers that attend to it, and one token for it."""
    [medium] = pictures(model, rows, generator)
    tiles = model.config.vision_config.max_num_tiles
    pixels = medium.tensors["pixel_values"][:, None, None].repeat(1, 1, tiles, 1, 1, 1)
    ids, mask = torch.ones(rows, 1, dtype=torch.long), torch.ones(rows, 1, tiles, dtype=torch.long)
    tensors = {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}
    yield Medium("image", tensors)


def cropped_once(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Each row's image as a small whole and one crop, with masks of half its patches' sides."""
    tower = model.config.vision_config
    size, side = tower.crop_size, tower.crop_size // tower.patch_size
    pixels = torch.randn(rows, 2, 3, size, size, generator=generator)
    tensors = {"image_pixel_values": pixels, "image_sizes": torch.full((rows, 2), size)}
    tensors["image_attention_mask"] = torch.ones(rows, 2, side, side, dtype=torch.long)
    yield Medium("image", tensors)


def frames(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """As `grids`, but a video of twice as many frames."""
    image, video = grids(model, rows, generator)
    values, shape = video.tensors.values()
    shape[:, 0] *= 2
    video.tensors["pixel_values_videos"] = values.repeat(2, 1)
    yield from (image, video)


def films(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """A square image and a video of four frames in each row."""
    [image] = pictures(model, rows, generator)
    pixels = image.tensors["pixel_values"]
    video = torch.randn(rows, 8, *pixels.shape[1:], generator=generator)
    yield Medium("image", {"pixel_values_images": pixels})
    yield Medium("video", {"pixel_values_videos": video})


def _sounds(mask: str = "", *, flat: bool = False, frames: int | None = None) -> Make:
    """A sound in each row: spectra `[rows, bins, frames]` (or frames first), and their mask."""

    def make(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
        config = model.config
        config = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
        bins = _first(config, "num_mel_bins", "n_mel_bins", "feature_size", "input_dim")
        length = frames or 2 * getattr(config, "max_source_positions", 16)
        spectra = torch.randn(rows, bins, length, generator=generator)
        tensors = {"input_features": spectra.mT.contiguous() if flat else spectra}
        if mask:
            tensors[mask] = torch.ones(rows, length, dtype=torch.long)
        yield Medium("audio", tensors)

    return make


def omni(model: PreTrainedModel, rows: int, generator: torch.Generator) -> Iterator[Medium]:
    """Images of two sizes, a video and a sound in each row."""
    yield from grids(model, rows, generator)
    yield from _sounds("feature_attention_mask")(model, rows, generator)


def image_format(model: PreTrainedModel) -> Make:
    """The format that a forward's arguments speak of."""
    takes = inspect.signature(model.forward).parameters
    if "image_grid_thw" in takes:
        return grids
    if "pixel_values" in takes:
        return pictures
    for mask in ("feature_attention_mask", "input_features_mask", ""):
        if "input_features" in takes and (not mask or mask in takes):
            return _sounds(mask)
    raise AssertionError(f"no format: {[*takes]}")


MAKERS: list[tuple[Make, str]] = [
    (hybrid, "deepseek_vl_hybrid"),
    (frames, "ernie4_5_vl_moe"),
    (sized, "emu3 lighton_ocr mistral3 mistral_large4"),
    (cropped, "granite4_vision llava_next llava_next_video llava_onevision"),
    (masked, "granite_docling"),
    (patched, "fuyu"),
    (placed, "gemma4 gemma4_unified"),
    (pooled, "molmo2"),
    (stills, "glm46v glm4v glm4v_moe glm5_next glm_ocr glmga"),
    (stacked, "kimi_k25 paddleocr_vl"),
    (spatial, "lfm2_vl"),
    (gridded, "nemotron_h_omni"),
    (tiles, "idefics2 idefics3 smolvlm"),
    (strips, "minicpm_ocr minicpmv4_6 minicpmv4_7"),
    (crossed, "mllama"),
    (_sounds("input_features_mask", flat=True), "nemo_speechlm fun_asr_nano"),
    (omni, "qwen2_5_omni_thinker"),
    (cropped_once, "phi4_multimodal"),
    (_sounds("input_features_mask", frames=200), "qwen3_asr"),
    (grids, "qwen3_omni_moe_thinker"),
    (merged, "video_llama_3"),
    (films, "video_llava"),
    (_sounds(flat=True), "granite_speech granite_speech_plus"),
]
FORMATS = {family: make for make, families in MAKERS for family in families.split()}
# Families for whose media no micro-batch can be made.
UNTRIED: dict[str, str] = {
    "mistral4": "its class takes text alone",
    "vibevoice_asr": "no tiny model of it: its convolutions keep their sizes",
}


def _of_crops(model: PreTrainedModel, medium: Medium) -> int:
    rows, crops, side, _ = medium.tensors["image_attention_mask"].shape
    return rows * (crops * side // 2 * (side // 2 + 1) + 1)  # each line ends with a token


# Tokens of media, where no method of the model tells.
COUNTS: dict[str, Callable[[PreTrainedModel, Medium], int]] = {
    "qwen2_audio": lambda model, medium: medium.tensors["input_features"][:, 0].numel() // 4,
    "mllama": lambda model, medium: len(medium.tensors["pixel_values"]),
    "phi4_multimodal": _of_crops,
}
