"""All private parts of transformers that the package uses."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import RLock, get_ident
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, masking_utils, video_utils
from transformers import core_model_loading as loading
from transformers import dynamic_module_utils as remote_code
from transformers.audio_utils import load_audio
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.auto import modeling_auto as auto
from transformers.utils import flatten_dict, import_utils
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.import_utils import is_torchvision_available
from transformers.video_utils import load_video, make_batched_metadata

from megatrain.base.changed import changed
from megatrain.compat.torch import FORWARD_HOOKS, contiguous_copy
from megatrain.errors import InputError

__all__ = [
    "auto", "eager_mask", "flatten_dict", "get_model_conversion_mapping", "load_audio", "loading",
    "render_jinja_template", "sdpa_attention_forward", "sdpa_mask",
]  # fmt: skip

CAUSAL_LM_CLASSES = frozenset(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""Names of transformers' classes of causal language models."""

MULTIMODAL_CLASSES: dict[str, str] = {
    **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
"""Names of the classes of language models that also take images or sound, by model type."""


def encoder_calls(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The methods, each with its module, by which a multimodal model calls its encoders."""
    names = ("get_image_features", "get_video_features", "get_audio_features")
    return [(m, name) for m in model.modules() for name in names if hasattr(type(m), name)]


def uncollected(module: nn.Module) -> list[nn.Module]:
    """The module; or its parts, if it holds hooks by which an outer model collects results."""
    inside = [part for part in module.modules() if part is not module]
    if isinstance(module, PreTrainedModel) or not any(part._forward_hooks for part in inside):
        return [module]  # hooks inside a PreTrainedModel collect results for that model
    return [part for child in module.children() for part in uncollected(child)]


def encodes(model: nn.Module) -> bool:
    """True if a model takes images or sounds (some have no method of `encoder_calls`)."""
    return type(model).__name__ in MULTIMODAL_CLASSES.values() or bool(encoder_calls(model))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The language model in a model that takes images or sounds; any other model itself."""
    if not encodes(model):
        return model
    decoder = model.get_decoder()
    # transformers 5.6 has the whole of Qwen3-Omni's thinker as its decoder.
    return getattr(model, "model", model) if decoder is model else decoder


def encoders(model: PreTrainedModel) -> list[nn.Module]:
    """The encoders of images and sounds in a model, without their projectors."""
    if not encodes(model):
        return []
    modules = [model.get_encoder(modality) for modality in ("image", "audio")]
    no_encoders = (None, model, model.base_model)  # None: the configuration leaves the tower out
    return [module for module in modules if module not in no_encoders]


BASE_CLASSES: dict[str, str] = {
    kind: name
    for kind, name in auto.MODEL_MAPPING_NAMES.items()
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MULTIMODAL_CLASSES
}
"""Names of the classes of language models without a head, by model type."""

Task = Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"]
"""PEFT's names of tasks. Models give logits of next tokens, scores or classes of rows, classes of
tokens, or without a head hidden states."""

TASKS: dict[str, Task] = {
    **dict.fromkeys(CAUSAL_LM_CLASSES.union(MULTIMODAL_CLASSES.values()), "CAUSAL_LM"),
    **dict.fromkeys(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(), "SEQ_CLS"),
    **dict.fromkeys(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(), "TOKEN_CLS"),
    **dict.fromkeys(BASE_CLASSES.values(), "FEATURE_EXTRACTION"),
}
"""The tasks of all classes that may be trained on text, by name."""

MODULE_MARKS = frozenset({"_is_hf_initialized"})
"""Attributes that transformers leaves on modules, and that no forward reads."""


def task_of(model: object) -> Task:
    """The task of a model's class."""
    return TASKS.get(type(model).__name__, "CAUSAL_LM")


def quantises(module: str, left_out: Iterable[str]) -> bool:
    """True unless a quantised model's configuration leaves this module out."""
    from transformers.quantizers.quantizers_utils import should_convert_module  # imports all kinds

    return should_convert_module(module, list(left_out))


def runs_on(model: PreTrainedModel, layers: Iterable[nn.Module]) -> bool:
    """True if layers have states or convolutions, which run on from one document into the next."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    parts = (part for layer in layers for part in layer.modules())
    are_convolutions = (isinstance(p, nn.Conv1d) and p.kernel_size != (1,) for p in parts)
    has_states = getattr(model, "_is_stateful", False) or "linear_attention" in kinds
    return has_states or any(are_convolutions)


def recorded_routers(model: PreTrainedModel) -> list[tuple[type[nn.Module], int, str]]:
    """A model's recorded routers: class of module, index of its output, place in the layer."""
    routers: dict[tuple[type[nn.Module], int, str], None] = {}
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            # A plain class in place of a recorder means the second output.
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                place = getattr(recorder, "layer_name", None) or ""
                routers[kind, getattr(recorder, "index", 1), place] = None
    return list(routers)


def counts_tokens(config: PreTrainedConfig) -> bool:
    """True if a model's cache counts its tokens; a cache of states alone, or Blt's, does not."""
    try:
        DynamicCache(config=config).get_seq_length()
    except (ValueError, AttributeError):
        return False
    return True


_code_by_name: dict[str, bytes] = {}


def mixes_code(folder: Path) -> bool:
    """True if transformers takes a folder's code for that of another one, read in this process.

    Older versions know a local folder's modules by the folder's name alone. Reading other code of
    that name would also change the functions of models that are open.
    """
    if hasattr(remote_code, "_compute_local_source_files_hash"):
        return False
    code = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return _code_by_name.setdefault(folder.name, code) != code


def configs(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield a configuration and all nested ones, with their paths: "", "text_config", ..."""
    yield path, config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from configs(inner, f"{path}.{key}".lstrip("."))


attention_of: Callable[[PreTrainedConfig], str | None] = attrgetter("_attn_implementation")
experts_of: Callable[[PreTrainedConfig], str | None] = attrgetter("_experts_implementation")
"""The implementation of attention, and of experts, that a configuration names."""


def set_attention(config: PreTrainedConfig, name: Any) -> None:
    """Set the implementation of attention, but not in nested configurations."""
    config._attn_implementation = {"": name}


def is_causal_alone(arguments: Mapping[str, Any]) -> bool:
    """True if a mask's arguments ask for causal attention (in a window) of unpadded rows alone."""
    padding = arguments.get("attention_mask")
    is_square = arguments["q_length"] == arguments["kv_length"]
    return (
        is_square
        and arguments.get("allow_is_causal_skip", True)
        and (padding is None or bool(padding.all()))
    )


def takes_flash_attention(model: nn.Module) -> bool:
    """True if a model's class declares that it supports flash attention, which takes no masks."""
    return bool(getattr(model, "_supports_flash_attn", False))


def set_experts(config: PreTrainedConfig, name: Any) -> None:
    """Set the implementation of experts, also in nested configurations."""
    config._experts_implementation = name


def takes_grouped_products(experts: nn.Module, names: Sequence[str] = ()) -> bool:
    """True if `experts_forward` can compute a module's forward, and multiplies by weights `names`.

    That holds for all families for which transformers has several implementations of experts.
    """
    marks = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    weights = {"gate_up_proj", "up_proj", "down_proj"}
    return weights.issuperset(names) and all(hasattr(experts, mark) for mark in marks)


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    """The sum of each of N tokens' K rows, given the rows' places `[N, K]`.

    The rows are added one after the other: torch.compile makes a reduction of
    `rows[places].sum(dim=1)`, which takes three to five times as long.
    """
    first, *others = places.unbind(dim=1)
    total = rows[first]
    for place in others:
        total = total.float() + rows[place]
    # A Function that ends with a conversion to the same dtype loses its gradient in torch 2.11.
    return total if total.dtype == rows.dtype else total.to(rows.dtype)


class Copied(torch.autograd.Function):
    """Copies tokens' values to rows; the gradient sums each token's rows in a fixed order.

    The gradient of plain indexing adds with atomic operations, in bf16 and in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """`values[tokens]`; `places` `[N, K]`: the rows of each token's K copies in the result."""
        ctx.save_for_backward(places)
        return values[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grads[0], *ctx.saved_tensors), None, None


class _Combined(torch.autograd.Function):
    """Sums each token's rows; the gradient of a row is its token's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """`[N, H]` from rows `[N * K, H]`; `tokens`: the token of each row."""
        ctx.save_for_backward(tokens)
        return _summed(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


def experts_forward(
    experts: Any,
    factors: Mapping[str, tuple[Tensor, Tensor, float]],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The result `[N, H]` of a layer's experts by grouped products, as transformers' `grouped_mm`.

    N tokens, K experts of a token, E experts, R the adapters' rank, I inputs, O outputs.

    Args:
        factors: by a weight's name, its adapter's factors `[E, I, R]` and `[E, R, O]`, and scale.
        hidden_states: [N, H].
        top_k_index, top_k_weights: [N, K].
    """
    top_k = top_k_index.shape[-1]
    row_experts, order = top_k_index.reshape(-1).sort(stable=True)  # a row for each expert chosen
    countable = row_experts.int() if row_experts.is_cuda else row_experts.float()  # by histc
    counts = countable.histc(experts.num_experts, 0, experts.num_experts - 1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    places, tokens = places.view(-1, top_k), order // top_k
    rows = Copied.apply(hidden_states, tokens, places)
    owners = getattr(experts, "owners", None)
    ends = counts.cumsum(0, dtype=torch.int32)
    if owners is not None:
        rows, row_experts, ends, give_back = owners.dispatch(rows, counts)

    def product(name: str, rows: Tensor) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[row_experts] if experts.has_bias else None
        weight, transposed = getattr(experts, name), experts.is_transposed
        out = moe._grouped_linear(rows, weight, ends, bias=bias, is_transposed=transposed)
        if name not in factors:
            return out
        lora_a, lora_b, scale = factors[name]
        if owners is not None:
            lora_a, lora_b = owners.own(lora_a), owners.own(lora_b)
        padding = -lora_a.shape[-1] % 8  # GPU kernels take rows of whole 16 bytes
        lora_a, lora_b = pad(lora_a, (0, padding)), contiguous_copy(pad(lora_b, (0, 0, 0, padding)))
        inner = moe._grouped_mm(rows, lora_a, offs=ends)
        return torch.add(out, moe._grouped_mm(inner, lora_b, offs=ends), alpha=scale)

    rows = product("gate_up_proj" if experts.has_gate else "up_proj", rows)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = product("down_proj", rows)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    if owners is not None:
        rows = give_back(rows)
    weights = Copied.apply(top_k_weights.reshape(-1), order, places.view(-1, 1))
    rows = rows * weights.unsqueeze(-1)
    return _Combined.apply(rows, tokens, places).to(hidden_states.dtype)


def without_atomic_sums(layer: nn.Module) -> None:
    """Let a layer's experts run `experts_forward`, whose gradients use no atomic additions."""
    for part in layer.modules():
        if takes_grouped_products(part) and experts_of(part.config) == "grouped_mm":
            part.forward = partial(experts_forward, part, {})


def set_owners(module: nn.Module, owners: Any) -> None:
    """Let experts compute on the ranks that own them (model/owned_experts.py); None: on all."""
    for part in module.modules():
        if takes_grouped_products(part):
            vars(part)["owners"] = owners
            if owners is not None:
                part.forward = partial(experts_forward, part, {})


def model_of(kind: type[PreTrainedModel], config: PreTrainedConfig, **options: Any) -> Any:
    """Make a model of a class; the options name its dtype."""
    return kind._from_config(config, **options)


def initialise(owner: PreTrainedModel, module: nn.Module) -> None:
    """Initialise a module's parameters at random, as its model's class does."""
    owner._init_weights(module)


def thaw(model: PreTrainedModel) -> None:
    """Let the parameters require gradients that do so after `from_pretrained`.

    It makes each floating-point parameter anew, which drops what constructors have frozen, and runs
    the initialisers of all modules once more, which may freeze. Values stay as they are.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for part in [*model.modules(), *tensors]:
        vars(part)["_is_hf_initialized"] = isinstance(part, Tensor)
    model.initialize_weights()
    for tensor in tensors:
        del vars(tensor)["_is_hf_initialized"]


def drop_ignorable(model: PreTrainedModel, report: Any) -> None:
    """Remove names from `report` that the model's class declares ignorable."""
    model._adjust_missing_and_unexpected_keys(report)


def not_saved(model: PreTrainedModel) -> set[str]:
    """Names of parameters that the model's class leaves out of its checkpoints."""
    return set(model._keys_to_ignore_on_save or ())


def in_fp32(model: PreTrainedModel, dtype: Any) -> list[str]:
    """Patterns of the names of parameters that stay in fp32 in a model of this dtype."""
    return list(model._get_dtype_plan(dtype))


def conversions_of(model: PreTrainedModel) -> list[Any] | None:
    """The weight conversions used when the model was loaded; None: it was not loaded."""
    return getattr(model, "_weight_conversions", None)


def set_conversions(model: PreTrainedModel, used: list[Any]) -> None:
    """Set the weight conversions that transformers reverses when it saves the model."""
    model._weight_conversions = used


def without_checkpointing(model: nn.Module) -> None:
    """Turn off transformers' gradient checkpointing and recording, in place."""
    for module in model.modules():
        attributes = vars(module)
        attributes.pop("_gradient_checkpointing_func", None)
        if hasattr(type(module), "gradient_checkpointing"):
            attributes.pop("gradient_checkpointing", None)
        elif "gradient_checkpointing" in attributes:
            attributes["gradient_checkpointing"] = False
        attributes.pop("_output_capturing_hooks_installed", None)
        for hooks in (attributes.get(name, {}) for name in FORWARD_HOOKS):
            for number, hook in list(hooks.items()):
                if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                    del hooks[number]


def types_tokens(processor: Any) -> bool:
    """True if a processor returns `mm_token_type_ids`: which tokens are of images and sounds."""
    setting = getattr(processor, "return_mm_token_type_ids", None)
    if setting is None:  # in transformers 5.17 it is an option for text
        defaults = getattr(processor.valid_processor_kwargs, "_defaults", {})
        setting = defaults.get("text_kwargs", {}).get("return_mm_token_type_ids")
    return bool(setting)


def has_decoder_of_sound() -> bool:
    """True if a package is installed that `load_audio` decodes sounds with."""
    return any(importlib.util.find_spec(name) for name in ("torchcodec", "soundfile"))


def decoder_of_films() -> str | None:
    """The name of an installed decoder with which `film_of` reads files; None: there is none."""
    packages = {"torchcodec": "torchcodec", "pyav": "av", "decord": "decord", "opencv": "cv2"}
    names = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    # From 0.26 on torchvision has no decoder.
    name = "is_torchvision_video_decoding_available"
    names += ["torchvision"] if getattr(video_utils, name, is_torchvision_available)() else []
    return names[0] if names else None


def film_of(
    processor: Any, film: str | NDArray[Any], check: Callable[[int, Any], None]
) -> tuple[NDArray[Any], dict[str, Any]]:
    """The frames `[F, H, W, 3]` that a processor samples from a film, and their metadata.

    Args:
        film: a file, or all its frames.
        check: called with the number of frames and the VideoMetadata before a file is decoded.
    """
    videos: Any = getattr(processor, "video_processor", None)
    sample: Any = None
    if getattr(videos, "do_sample_frames", False):
        settings = {n: getattr(videos, n, None) for n in videos.valid_kwargs.__annotations__}
        sample = partial(videos.sample_frames, **settings)

    def frame_indices(metadata: Any, **_: Any) -> Any:
        if metadata.total_num_frames < 1:
            raise InputError("its header does not say how many frames it has: write it as .mp4")
        all_frames = np.arange(metadata.total_num_frames)
        sampled = all_frames if sample is None else sample(metadata=metadata)
        check(len(sampled), metadata)
        metadata.frames_indices = sampled
        return sampled

    if not isinstance(film, str):
        [metadata] = make_batched_metadata([film], None)
        frames = film if sample is None else film[frame_indices(metadata)]
        return frames, {} if videos is None else vars(metadata)
    loaded, metadata = load_video(film, backend=decoder_of_films(), sample_indices_fn=frame_indices)
    frames = np.asarray(loaded)
    return frames if frames.shape[-1] == 3 else frames.transpose(0, 2, 3, 1), vars(metadata)


@contextmanager
def unpacked() -> Iterator[None]:
    """Within this context masks are made for rows of one document each, also on the meta device.

    Elsewhere transformers reads the values of tensors, unless they are fake or traced.
    """
    is_fake = import_utils.is_fake_tensor

    def has_no_data(value: Any) -> bool:
        return is_fake(value) or (isinstance(value, Tensor) and value.is_meta)

    with _finding(lambda position_ids: None), changed([import_utils], is_fake_tensor=has_no_data):
        yield


def finding_once(
    document_indices: list[Tensor | None], find: Callable[..., Tensor | None], *, padded: bool
) -> AbstractContextManager[None]:
    """Within this context masks are made with few reads of values, each of which waits for a GPU.

    Args:
        document_indices: those that this forward has computed for these rows, in the order of its
            calls; new ones are appended.
        find: computes document indices, given transformers' function and the positions.
        padded: True if the attention mask hides tokens, so that it cannot be left out.
    """
    original, calls = masking_utils.find_packed_sequence_indices, count()

    def find_or_reuse(position_ids: Tensor) -> Tensor | None:
        number = next(calls)
        if number == len(document_indices):
            document_indices.append(find(original, position_ids))
        return document_indices[number]

    can_be_ignored = masking_utils._ignore_causal_mask_sdpa

    def ignores(mask: Tensor | None, *sizes: Any, **named: Any) -> bool:
        return not (padded and mask is not None) and can_be_ignored(mask, *sizes, **named)

    return _finding(find_or_reuse, _ignore_causal_mask_sdpa=ignores)


_changing = RLock()  # one thread at a time changes transformers' functions


@contextmanager
def _finding(find: Callable[[Tensor], Tensor | None], **patched: Any) -> Iterator[None]:
    """Within this context masks of this thread are made with `find` and the functions `patched`."""
    patched["find_packed_sequence_indices"] = find
    remap = getattr(masking_utils, _REMAP, None)  # older versions of transformers lack it
    if remap is not None:
        patched[_REMAP] = lambda mask, ids: mask if _has_blocks(mask) else remap(mask, ids)
    thread = get_ident()

    def in_thread(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `function` in this thread, and transformers' own function in other threads."""
        original = getattr(masking_utils, name)

        def run(*args: Any, **named: Any) -> Any:
            return (function if get_ident() == thread else original)(*args, **named)

        return run

    with _changing:
        functions = {name: in_thread(name, function) for name, function in patched.items()}
        with changed([masking_utils], **functions):
            yield


_REMAP = "remap_positions_for_packed_sequence"


def _has_blocks(mask: Any) -> bool:
    """True if a mask looks up images by positions in the row (Gemma 3's sliding layers).

    transformers would pass it positions within a document, where the row may have other images.
    """
    if isinstance(mask, tuple):
        return any(map(_has_blocks, mask))
    cells = getattr(mask, "__closure__", None) or ()
    of_blocks = getattr(mask, "__qualname__", "").startswith("blockwise_overlay")
    return of_blocks or any(_has_blocks(cell.cell_contents) for cell in cells)


def num_items(trainer: Any, batch: Mapping[str, Tensor]) -> float | None:
    """The divisor of a batch's loss in a Trainer; None: it takes the mean."""
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    return None if items is None else float(items)
