"""A run's model as a Hugging Face folder, in another dtype if wanted."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megatrain.base.whole_files import whole_folder
from megatrain.checkpoint import Checkpoint
from megatrain.compat.gguf import is_gguf, unpacked_folder
from megatrain.errors import InputError, RunFailed, explained, in_one_line
from megatrain.model.companions import companions, write_companions
from megatrain.model.export import REPLACED, pack_like, packed_weights_of
from megatrain.run_folder.layout import holds_model, require_empty
from megatrain.source.source import adapter_folder
from megatrain.source.write_model import write_saved
from megatrain.train.resolve import trained_model

CONVERTER = "convert_hf_to_gguf.py"


def export(
    run: str,
    out: Path,
    dtype: str | None = None,
    *,
    merged: bool = False,
    gguf: str | None = None,
    like: Path | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the model of `run` to `out`, whole or not at all.

    Args:
        run: a checkpoint, a model folder or GGUF file, or a run's folder (its finished model, else
            its newest whole checkpoint).
        dtype: float32 (of a checkpoint the exact masters), bfloat16 or float16 for all floating
            tensors; None: each keeps its own, a checkpoint's that of the run's first model.
        merged: write a model with an adapter as one model, not the adapter alone.
        gguf: f16 or q8_0: write a GGUF file of this type into the folder, too.
        like: pack weights as this folder stores them (`pack_like`).

    Raises InputError: `run` has no such model, `out` is not empty, or llama.cpp's converter or the
    format of `like` does not take the model; RunFailed: the disk is full.
    """
    model: Checkpoint | Path | str = trained_model(run)
    converter = shutil.which(CONVERTER)
    cast = None if dtype is None else getattr(torch, dtype)
    require_empty(out)
    if gguf is not None and converter is None:
        raise InputError(f"--gguf calls llama.cpp's {CONVERTER}; put a checkout of it on PATH")
    if like is not None and (gguf is not None or dtype is not None):
        raise InputError("--like packs weights; leave --gguf and --dtype out")
    packed = {} if like is None else packed_weights_of(like)  # raises before anything is written
    if not isinstance(model, Checkpoint):
        model = unpacked_folder(Path(model)) if is_gguf(model) else Path(model)
        if not holds_model(model):
            raise InputError(f"{run}: no finished model there (neither model/ nor config.json)")
        if merged and adapter_folder(model) is None:
            raise InputError(f"{model}: has no adapter that could be merged; leave --merged out")
        if not any(model.glob("*.safetensors")):
            missing = "a configuration without weights (.safetensors); not a model"
            raise InputError(f"{model}: {missing}")
    with whole_folder(out) as folder:
        if isinstance(model, Checkpoint) or merged or cast is not None:
            write_saved(model, folder, cast, merged=merged, trust_remote_code=trust_remote_code)
        else:
            for path in model.iterdir():
                if path.suffix == ".safetensors" or REPLACED.fullmatch(path.name):
                    shutil.copyfile(path, folder / path.name)
            write_companions(folder, companions(model))
        if like is not None:
            if adapter_folder(folder) is not None:
                raise InputError("--like packs a whole model, not an adapter; add --merged")
            with explained(f"{out}: cannot be packed", "make room", of=OSError, into=RunFailed):
                pack_like(folder, like, packed)
        if gguf is not None:
            _convert(str(converter), folder, folder / f"{out.resolve().name}-{gguf}.gguf", gguf)


def _convert(converter: str, folder: Path, file: Path, kind: str) -> None:
    if adapter_folder(folder) is not None:
        raise InputError("--gguf writes a whole model, and this is an adapter; add --merged")
    command = [sys.executable, converter, str(folder), "--outtype", kind, "--outfile", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode or not file.is_file():
        last_line = in_one_line((process.stderr.strip() or "no file").splitlines()[-1], 300)
        raise InputError(f"{converter}: fails on this model: {last_line}; export without --gguf")
