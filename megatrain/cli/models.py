"""The configuration of the model that an option names: no weights are read or downloaded.

Shapes are the Qwen2.5 family's, from its published config.json files:
https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json and its siblings. 120b is no published
model: it is the 72B's heads, vocabulary and ratios with 10240 wide layers, as many as make 120
billion parameters, the largest dense size that the MegaTrain paper (arXiv 2604.05091) names.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.errors import InputError, explained
from megatrain.model.quantised import quantisation, quantised_base, unpacked_format
from megatrain.model.safetensors_io import has_weights
from megatrain.model.trained import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Qwen2Config

    from megatrain.config import ModelSection
    from megatrain.model.spec import ModelSpec
    from megatrain.source.source import Base


@dataclass(frozen=True)
class NamedModel:
    """A model by its configuration, for a plan."""

    name: str
    config: "PreTrainedConfig"
    adapter: Any = None  # the adapter to train, or None
    frozen: "Base" = "bf16"  # the format of frozen layers
    opening: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `open_source`
    trained: Mapping[str, Any] = field(default_factory=dict)  # arguments of `Trained`
    # False if weights are random, with which encoders of images are trained as well
    pretrained: bool = True

    @property
    def base(self) -> Literal["fp8", "nf4"] | None:
        """The format in which the weights are quantised; None: none that is supported."""
        with suppress(InputError):
            return quantised_base(self.config.to_dict(), self.name)
        return None

    @property
    def unpacked(self) -> str | None:
        """The format from which weights are unpacked as they are read; None: as stored."""
        return None if self.frozen == "folder" else unpacked_format(self.config.to_dict())

    @property
    def quantised(self) -> str | None:
        """The reason why the model's weights cannot be trained; None: they can."""
        config = self.config.to_dict()
        if not quantisation(config) or unpacked_format(config) or (self.base and self.adapter):
            return None
        return f"the weights of {self.name} are quantised, and such are not trained"

    @property
    def packed_folder(self) -> Path | None:
        """The local folder that says which weights stay packed; None: it is not needed."""
        folder = Path(self.config.name_or_path)
        return folder if (self.base or self.frozen == "folder") and has_weights(folder) else None

    def spec(self) -> "ModelSpec":
        """The model's `ModelSpec`. Raises InputError: the engine does not support the model."""
        from megatrain.source.source import choose_parameters, open_source, structure

        base = (self.adapter and self.base) or self.frozen
        source = open_source(self.config, self.adapter, base, **self.opening)
        source.folder = self.packed_folder
        choose_parameters(source, Trained(**self.trained), pretrained=self.pretrained)
        return structure(source)


def lora_adapter(rank: int) -> dict[str, Any] | None:
    """PEFT's keys for LoRA of this rank on all linear layers; 0: no adapter."""
    return {"r": rank, "target_modules": "all-linear"} if rank else None


def model_of_run(
    name: str, section: "ModelSection", adapter: dict[str, Any] | None = None, *, head: Any = None
) -> NamedModel:
    """The model of a run file's section; `head`: a ClassHead in place of its own, or None."""
    from megatrain.model.build import with_head
    from megatrain.train.resolve import ResolvedModel

    if section.path is not None:
        config = named_config(section.path, trust_remote_code=section.trust_remote_code)
        adapter = adapter or _adapter_of(section)
    else:
        config = ResolvedModel.of(section).config
    config = with_head(config, head) if head else config
    code = section.model_dump(include={"trust_remote_code", "attn_implementation"})
    trained = section.model_dump(include={"freeze", "train_only"})
    opening = {"routers": section.routers, **code}
    pretrained = section.path is not None
    return NamedModel(name, config, adapter, section.base, opening, trained, pretrained)


def _adapter_of(section: "ModelSection") -> Any:
    """The configuration of the adapter that `path` has already; None: it has none."""
    from megatrain.checkpoint import Checkpoint
    from megatrain.compat import peft
    from megatrain.source.source import adapter_folder, folder_adapter
    from megatrain.train.resolve import ResolvedModel

    source = ResolvedModel.of(section).source
    if isinstance(source, Checkpoint):
        saved = source.settings.adapter
        return None if saved is None else peft.from_json(saved["configs"][saved["active"]])
    folder = adapter_folder(source)
    return None if folder is None else folder_adapter(folder)[0]


def named_config(
    name: str, *, max_positions: int = 32768, trust_remote_code: bool = False
) -> "PreTrainedConfig":
    """The configuration of a shape (`7B`), a folder, a config.json file, or a hub id.

    Of a hub model only config.json is fetched.

    Args: `max_positions`: a shape gets at least so many positions.

    Raises InputError: there is no such model, or the hub cannot be reached.
    """
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        from megatrain.model.build import load_config

        if path.is_dir() and not (path / "config.json").is_file():
            from megatrain.config import ModelSection
            from megatrain.model.weights import resolve_model
            from megatrain.train.resolve import ResolvedModel

            resolved = ResolvedModel.of(ModelSection(path=str(path))).section
            path = resolve_model(str(resolved.path), weights=False)
        return load_config(path, trust_remote_code=trust_remote_code)
    if name.lower() in SHAPES:
        return qwen2_config(name.lower(), max_positions)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        from megatrain.config import nearest

        raise InputError(
            f"unknown model {name!r}{nearest(name.lower(), list(SHAPES))} (or give a folder, a "
            "config.json, or owner/name)"
        )
    from megatrain.model.build import read_config

    problem = f"{name}: no such folder, and its config.json cannot be had from the hub"
    with explained(problem, "check the spelling and the network, or give a config.json file"):
        return read_config(name, trust_remote_code=trust_remote_code)


_COLUMNS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
SHAPES = {
    "toy": (256, 704, 4, 4, 2, 4096, True),  # no published model: for a quick look
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
    "120b": (10240, 36864, 86, 80, 8, 152064, False),
}

MAX_TOKENS = 32768  # positions of Qwen2.5


def qwen2_config(name: str, tokens: int = 0, layers: int | None = None) -> "Qwen2Config":
    """The transformers configuration of a shape in `SHAPES`.

    Args:
        tokens: of the longest row, which may need more positions than Qwen2.5 has.
        layers: their number, in place of the shape's.
    """
    from transformers import Qwen2Config

    shape: dict[str, Any] = dict(zip(_COLUMNS, SHAPES[name], strict=True))
    if layers is not None:
        shape["num_hidden_layers"] = layers
    positions = max(tokens, MAX_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen2Config(
        **shape, max_position_embeddings=positions, rope_parameters=rope, dtype="bfloat16"
    )
