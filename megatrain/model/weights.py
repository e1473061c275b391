"""Reads a model's weights from a safetensors checkpoint, one parameter at a time.

Checkpoints on the hub have the names and layouts of their publication, for example one tensor for
each expert where the model's class has one for each layer. transformers describes the conversions
as renamings and converters (transformers.core_model_loading). Here conversions are planned from
names and shapes alone, and run for one parameter at a time: no second copy of the model exists.
"""

import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import starmap
from operator import methodcaller
from pathlib import Path
from threading import Condition, Event
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.base.json_yaml import read_json
from megatrain.base.units import IN_FLIGHT_BYTES, MIB
from megatrain.base.whole_files import forget_pages
from megatrain.compat import transformers as hf
from megatrain.compat.gguf import is_gguf, unpacked_folder
from megatrain.errors import InputError, explained
from megatrain.model.quantised import Packed, joined_bytes, unpacked_format, with_packed_weights
from megatrain.model.safetensors_io import Stored, has_pickle_weights, has_weights, stored_tensors
from megatrain.tile.formats import BLOCKS, FP8, NF4, NF4_WIDE, SIDE, WeightFormat

log = logging.getLogger(__name__)

Write = Callable[[str, Tensor], None]

_JOINS = {hf.loading.Concatenate, hf.loading.MergeModulelist}
_SIDES = {BLOCKS: SIDE, FP8: 1, NF4: 64, NF4_WIDE: 64}  # joined tensors need multiples of these
COMPARED_BYTES = 16 * MIB

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.model.v?", "*.txt", "*.jinja", "*.tiktoken"]
HUB_FILES += ["*.bpe", "*.spm", "*.vocab", "*.py"]
HUB_FILES += ["LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md"]
HUB_EXTRAS = ["*/*", "consolidated*"]  # other formats of the same weights
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def resolve_model(
    path_or_id: str | Path, revision: str | None = None, *, weights: bool = True
) -> Path:
    """The folder of a model: a local one, that of an unpacked GGUF file, or a download.

    Args:
        revision: of a model on the hub; None: the newest.
        weights: False: weights of a model on the hub are not downloaded.

    Raises InputError: no such folder or hub model, no access, no network, or only pickle weights.
    """
    folder = Path(os.path.expanduser(path_or_id))
    if is_gguf(folder):
        return unpacked_folder(folder)
    if not folder.exists():
        problem = f"{path_or_id}: no such folder, and it cannot be had from the hub"
        remedy = (
            "check the spelling (owner/name), the network and HF_HUB_OFFLINE; accept the terms on "
            "its hub page, and log in with `hf auth login`, if its owner restricts access"
        )
        files = [name for name in HUB_FILES if weights or name != "*.safetensors"]
        options: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": HUB_EXTRAS}
        with explained(problem, remedy):  # errors of the HTTP library differ between versions
            folder = Path(snapshot_download(str(path_or_id), revision=revision, **options))
    if not folder.is_dir():
        raise InputError(f"{path_or_id}: not a folder; give the model's folder or its hub id")
    if not (folder / "config.json").is_file():
        raise InputError(f"{path_or_id}: no config.json there, so it is not a model's folder")
    if weights and not has_weights(folder) and has_pickle_weights(folder):
        stored_tensors(folder)  # raises, with the reason and a remedy
    return folder


def source_dtype(folder: Path) -> torch.dtype:
    """The dtype of a published model: that of config.json, or else of most of its bytes.

    Without either it is float32, as in transformers.
    """
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        name = section.get("dtype") or section.get("torch_dtype")
        if name is not None:
            dtype = getattr(torch, str(name).removeprefix("torch."), None)
            if dtype not in FLOATS:
                raise InputError(
                    f"{folder / 'config.json'}: dtype {name!r} is no float to train with (of 16 or "
                    "32 bits); convert the weights"
                )
            return dtype
    if not has_weights(folder):
        return torch.float32
    num_bytes = dict.fromkeys(FLOATS, 0)
    for stored in stored_tensors(folder).values():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    return max(FLOATS, key=num_bytes.__getitem__)


class RecipePart(NamedTuple):
    """A stored tensor of a recipe, and the converter's pattern for its name ("": there is none)."""

    pattern: str
    stored: Stored


@dataclass
class Recipe:
    """A plan to make one parameter, or several by one converter, from stored tensors."""

    target: str  # with a converter: the name from which its outputs' names are derived
    converter: hf.loading.WeightConverter | None
    parts: list[RecipePart]

    @property
    def files(self) -> set[Path]:
        """The files of the parts; of a packed one the file of its codes."""
        return {part.stored.file for part in self.parts}

    @property
    def packing(self) -> WeightFormat | None:
        """The format of all parts, if the target is their bytes, joined; else None."""
        tensors = [part.stored for part in self.parts]
        formats = {t.packing if isinstance(t, Packed) else None for t in tensors}
        packing = formats.pop() if len(formats) == 1 else None
        if self.converter is None or packing is None:
            return packing
        only_joins = {type(operation) for operation in self.converter.operations} <= _JOINS
        side = _SIDES.get(packing, 0)
        in_whole_blocks = side and all(n % side == 0 for t in tensors for n in t.shape)
        packing = NF4_WIDE if packing is NF4 else packing  # NF4's mean differs for each part
        return packing if only_joins and in_whole_blocks else None

    def build(self, model: PreTrainedModel, load: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """The finished tensors by the model's names; `load` gives the values of a stored tensor."""
        if self.converter is None:
            return {self.target: load(self.parts[0].stored)}
        converter = copy.deepcopy(self.converter)  # a converter keeps tensors that it gets
        for pattern, stored in self.parts:
            converter.add_tensor(self.target, stored.name, pattern, load(stored))
        built = converter.convert(self.target, model=model, config=model.config)
        pairs = ((name, x[0] if isinstance(x, list) else x) for name, x in built.items())
        return {name: tensor.contiguous() for name, tensor in pairs}


def read_weights(
    folder: Path,
    model: PreTrainedModel,
    write: Write,
    *,
    threads: int,
    packed: Mapping[str, WeightFormat] | None = None,
) -> tuple[str, ...]:
    """Read every parameter and persistent buffer of `model` from the checkpoint in `folder`.

    All that headers show is checked before the first write. Then `write(name, tensor)` is called
    once for each distinct parameter and persistent buffer, from up to `threads` threads, with the
    model's name, and the file's values on the CPU, contiguous and of the model's shape.

    Args:
        folder: has model.safetensors, or shards and their index.
        model: has names, shapes and ties; `_weight_conversions` is set as by `from_pretrained`.
        write: an exception of it ends the load and is raised again.
        threads: tensors that are read at once, within IN_FLIGHT_BYTES.
        packed: the format of tensors, by name, that are passed as bytes if the folder has it.

    Returns the names that the checkpoint lacks, as the model's class allows: the caller initialises
    them. Raises InputError: tensors missing, unknown, misshapen, of another dtype, or damaged.
    """
    plan = WeightPlan(folder, model)
    recipes, left_out = plan.checked()
    if packing := unpacked_format(read_json(folder / "config.json")):
        text = "%s: unpacked from %s to %s; exports are unpacked, but for --like"
        log.info(text, folder, packing, str(source_dtype(folder)).removeprefix("torch."))
    unread = Counter(file for recipe in recipes for file in recipe.files)  # recipes still to read
    room, free_bytes, failed = Condition(), IN_FLIGHT_BYTES, Event()

    def read_and_write(recipe: Recipe) -> Recipe:
        nonlocal free_bytes
        # A tensor beyond the limit is read alone. Merging needs the parts and the result.
        num_bytes = sum(part.stored.num_bytes for part in recipe.parts)
        num_bytes = min(num_bytes * (1 if recipe.converter is None else 2), IN_FLIGHT_BYTES)
        with room:
            room.wait_for(lambda: free_bytes >= num_bytes)
            free_bytes -= num_bytes
        try:
            if not failed.is_set():
                # No variable keeps a tensor when its bytes are given back.
                list(starmap(write, plan.build(recipe, packed).items()))
        except BaseException:
            failed.set()
            raise
        finally:
            with room:
                free_bytes += num_bytes
                room.notify_all()
        return recipe

    with ThreadPoolExecutor(threads, thread_name_prefix="read-weights") as pool:
        for recipe in pool.map(read_and_write, recipes):
            unread.subtract(recipe.files)
            for path in (file for file in recipe.files if not unread[file]):
                with suppress(OSError), path.open("rb") as file:
                    forget_pages(file.fileno())
    return left_out


def lazy_weights(
    folder: Path, model: PreTrainedModel, packed: Mapping[str, WeightFormat] | None = None
) -> dict[str, Callable[[], Tensor]]:
    """For each parameter and buffer of `model`, by its first name, a function that reads it.

    Args: `packed`: as of `read_weights`.

    Raises InputError: as `read_weights`; a function raises it for damaged data.
    """
    plan = WeightPlan(folder, model)
    recipes, _ = plan.checked()

    def read(recipe: Recipe, first: str) -> Tensor:
        return plan.build(recipe, packed)[first]

    return {
        (first := plan.first_name[name]): partial(read, recipe, first)
        for recipe in recipes
        for name in recipe.build(model, Stored.blank)
    }


_LM_HEADS = "lm_head.", "embed_out.", "cls."  # beginnings of names of language models' heads


def carried_tensors(folder: Path, model: PreTrainedModel) -> dict[str, Stored]:
    """The tensors of `folder` that `model` does not have, by their names there.

    The model's class allows these in a checkpoint: layers that predict further tokens, for example.
    Their files stay open, so that they can be read even if the folder is deleted. Files that no
    index names are logged.

    Raises InputError: as `WeightPlan`.
    """
    plan = WeightPlan(folder, model)
    for path in sorted({*folder.glob("*.safetensors")} - plan.files):
        if not path.name.startswith(("consolidated", "adapter_model")):
            log.warning("%s: is named by no index, so neither read nor exported", path)
    heads = _LM_HEADS if hf.task_of(model) != "CAUSAL_LM" else ()
    carried: list[Stored] = []
    for name, tensors in plan.unexpected.items():
        carried += [] if name.startswith(heads) else tensors
    unsaved = hf.not_saved(model)
    recipes = [recipe for recipe in plan.recipes if recipe.target in unsaved]
    carried += [part.stored for recipe in recipes for part in recipe.parts]
    opened = cache(lambda path: path.open("rb", buffering=0))
    return {stored.name: stored.kept_open(opened) for stored in carried}


class WeightPlan:
    """The plan by which a folder's tensors become a model's.

    Attributes:
        recipes: for the model's tensors.
        unexpected: the folder's other tensors, by the names that they would have in the model.
        first_name: for each name, the first name of the same tensor.
        types: the dtype of each parameter and buffer in the folder, by first name.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Raises InputError: tensors misshapen or not of a float dtype, or damaged files."""
        self._folder, self._model = folder, model
        references = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self.first_name = {name: first.setdefault(id(t), name) for name, t in references.items()}
        stored = stored_tensors(folder)
        self.recipes, self.unexpected = _plan_load(model, with_packed_weights(folder, stored))
        self.files = {tensor.file for tensor in stored.values()}
        dtypes = _check_recipes(model, self.recipes, references)
        self.types = {self.first_name[name]: dtype for name, dtype in dtypes.items()}

    @property
    def packings(self) -> dict[str, WeightFormat]:
        """The format of each quantised parameter in the folder, by first name."""
        formats = {self.first_name.get(r.target, ""): r.packing for r in self.recipes}
        return {name: packing for name, packing in formats.items() if name and packing}

    def checked(self) -> tuple[list[Recipe], tuple[str, ...]]:
        """A recipe for each distinct tensor, and names that may be missing and are.

        Raises InputError: other names are missing, some are unknown, or tied tensors differ.
        """
        recipes = _without_tied_copies(self.recipes, self.first_name)
        missing = set(self.first_name.values()) - self.types.keys()
        return recipes, _check_complete(self._folder, self._model, missing, self.unexpected)

    def build(self, recipe: Recipe, packed: Mapping[str, WeightFormat] | None) -> dict[str, Tensor]:
        """The tensors of a recipe by first name; `packed`: as of `read_weights`."""
        packing = (packed or {}).get(self.first_name.get(recipe.target, ""))
        if packing is None or recipe.packing != packing:
            built = recipe.build(self._model, methodcaller("read"))
            return {self.first_name[name]: tensor for name, tensor in built.items()}
        # A section is one tensor of the format: scales, codes. Sections are built each by itself.
        in_rows = recipe.converter and packing is NF4_WIDE
        read = Packed.nf4_rows if in_rows else Packed.packing_tensors
        sources = (part.stored for part in recipe.parts)
        sections = {s.name: read(s) for s in sources if isinstance(s, Packed)}
        first, *_ = sections.values()

        def build_section(index: int) -> dict[str, Tensor]:
            return recipe.build(self._model, lambda stored: sections[stored.name][index])

        built_sections = [build_section(index) for index in range(len(first))]
        return {
            self.first_name[name]: joined_bytes(section[name] for section in built_sections)
            for name in built_sections[0]
        }


def _plan_load(
    model: PreTrainedModel, stored: Mapping[str, Stored]
) -> tuple[list[Recipe], dict[str, list[Stored]]]:
    """Match stored tensors with the model's names, as transformers' loading does.

    The used conversions go into `model._weight_conversions`: transformers reverses them to save.
    """
    conversions = hf.get_model_conversion_mapping(model)
    renamings = [x for x in conversions if isinstance(x, hf.loading.WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, hf.loading.WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    names = model.state_dict()
    prefix = model.base_model_prefix

    recipes: dict[str, Recipe] = {}
    unexpected: dict[str, list[Stored]] = {}
    for name in sorted(stored, key=hf.loading.dot_natural_key):
        target, pattern = hf.loading.rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:
            target, pattern = hf.loading.rename_source_key(name, [], [], prefix, names)
        if target not in names:
            unexpected.setdefault(target, []).append(stored[name])
        else:
            converter = None if pattern is None else by_pattern[pattern]
            recipe = recipes.setdefault(target, Recipe(target, converter, []))
            if recipe.parts and (converter is None or recipe.converter is None):
                raise InputError(
                    f"{stored[name].file}: {name!r} is stored again under another name"
                )
            recipe.parts.append(RecipePart(pattern or "", stored[name]))
    hf.set_conversions(model, [conversion for conversion in conversions if conversion.was_used()])
    return list(recipes.values()), unexpected


def _check_recipes(
    model: PreTrainedModel, recipes: list[Recipe], references: Mapping[str, Tensor]
) -> dict[str, torch.dtype]:
    """Build all recipes on the meta device; returns the dtypes of their tensors by name."""
    built: dict[str, torch.dtype] = {}
    for recipe in recipes:
        stored = recipe.parts[0].stored
        where = f"{stored.file}: {stored.name!r}"
        if recipe.converter is not None:
            where += f" (and {len(recipe.parts) - 1} others, which are merged or split)"
        problem = f"{where} cannot become {recipe.target!r}"
        with explained(problem, "tensors are missing or of a wrong shape"):
            outputs = recipe.build(model, Stored.blank)  # operations raise errors of any type
        for name, tensor in outputs.items():
            if name not in references or name in built:
                raise InputError(f"{where} would give {name!r}, which is no parameter to be read")
            _check_tensor(model, where, name, tensor, references[name])
            built[name] = tensor.dtype
    return built


def _check_tensor(
    model: PreTrainedModel, where: str, name: str, tensor: Tensor, reference: Tensor
) -> None:
    """Raises InputError: a built tensor has another shape than the model's, or another dtype."""
    if tensor.shape != reference.shape:
        raise InputError(
            f"{where} has shape {list(tensor.shape)}, but {type(model).__name__} needs "
            f"{list(reference.shape)} for {name!r}; weights and config.json do not belong together"
        )
    floats = reference.is_floating_point()
    is_right = tensor.dtype in FLOATS if floats else not tensor.is_floating_point()
    if not is_right:
        raise InputError(
            f"{where} has dtype {str(tensor.dtype).removeprefix('torch.')}, and {name!r} holds "
            f"{'floats of at most 32 bits' if floats else reference.dtype}; use the unquantised "
            "model, or one whose config.json has the right quantization_config; convert float64"
        )


def _without_tied_copies(recipes: list[Recipe], first_name: Mapping[str, str]) -> list[Recipe]:
    """One recipe for each distinct parameter. Raises InputError: copies of a parameter differ.

    transformers would read such copies as untied, whatever config.json says: as another model.
    """
    by_parameter: dict[str, Recipe] = {}
    for recipe in recipes:
        first = first_name.get(recipe.target, recipe.target)
        first_recipe = by_parameter.setdefault(first, recipe)
        if first_recipe is not recipe and not _same_values(first_recipe, recipe):
            raise InputError(
                f"{recipe.parts[0].stored.file}: {recipe.target!r} and {first_recipe.target!r} are "
                "tied in config.json, but their values differ; set tie_word_embeddings to false"
            )
    return list(by_parameter.values())


def _same_values(one: Recipe, other: Recipe) -> bool:
    """True if the single tensors of two recipes are equal; compared in pieces, as bytes."""
    a, b = one.parts[0].stored, other.parts[0].stored
    if isinstance(a, Packed) or isinstance(b, Packed):
        return torch.equal(a.read(), b.read())
    if one.converter or other.converter or (a.dtype, a.num_bytes) != (b.dtype, b.num_bytes):
        return False
    for offset in range(0, a.num_bytes, COMPARED_BYTES):
        count = min(COMPARED_BYTES, a.num_bytes - offset)
        if not torch.equal(a.read_bytes(offset, count), b.read_bytes(offset, count)):
            return False
    return True


def _check_complete(
    folder: Path, model: PreTrainedModel, missing: set[str], unexpected: dict[str, list[Stored]]
) -> tuple[str, ...]:
    """The missing names, sorted. Raises InputError: one is needed, or an unexpected one unknown."""
    report = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    hf.drop_ignorable(model, report)
    # transformers ignores layers of multi-token prediction by fixed names; here by their numbers.
    text = model.config.get_text_config(decoder=True)
    start = getattr(text, "num_hidden_layers", 0)
    stop = start + (getattr(text, "num_nextn_predict_layers", None) or 0)
    ignored_layers = [f".layers.{number}." for number in range(start, stop)]
    report.unexpected_keys = {
        n for n in report.unexpected_keys if not any(layer in f".{n}" for layer in ignored_layers)
    }
    architecture = (read_json(folder / "config.json").get("architectures") or [""])[0]
    from_classifier = hf.TASKS.get(architecture) in ("SEQ_CLS", "TOKEN_CLS")
    if hf.task_of(model) != "CAUSAL_LM" and not from_classifier:
        head = "score.", "classifier.", "pooler."
        report.missing_keys = {n for n in report.missing_keys if not n.startswith(head)}
        report.unexpected_keys = {n for n in report.unexpected_keys if not n.startswith(_LM_HEADS)}
    if report.missing_keys:
        raise InputError(
            f"{folder}: {_some(report.missing_keys)} missing from the checkpoint of a "
            f"{type(model).__name__}; it is incomplete or config.json belongs to another model"
        )
    if report.unexpected_keys:
        names = [name for name in unexpected if name in report.unexpected_keys]
        unknown = [stored for name in names for stored in unexpected[name]]
        raise InputError(
            f"{unknown[0].file}: {_some({stored.name for stored in unknown})} "
            f"unknown to {type(model).__name__}; config.json belongs to another model"
        )
    return tuple(sorted(missing))


def _some(names: set[str]) -> str:
    if len(names) == 1:
        return f"tensor {min(names)!r} is"
    return f"{len(names)} tensors ({min(names)!r} the first) are"
