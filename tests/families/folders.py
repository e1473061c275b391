"""Families from folders: the engine against `from_pretrained` in the same dtype.

A tiny model is saved as an fp32 and as a bf16 folder. Floating persistent buffers are random and
stored in fp32 in both, with bits that bf16 does not have. From each folder both sides take one
clipped AdamW step in fp32, to the tolerances of `parity`; of the bf16 folder the loss is computed
in bf16 as well. The engine's buffers must be those of `from_pretrained`, its export must equal
the folder in all that was not trained, and another process must go on from its checkpoint.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain import AdamW, Engine, InputError
from megatrain.source.source import Source, open_source
from megatrain.train.export import export
from tests.families.parity import LOSS_TOLERANCE, Errors, Reference, compare_steps, compare_updates
from tests.families.plain import EPS, LR, accumulate, make_steps, shares
from tests.families.roundtrip import EXACT, goes_on
from tests.families.tiny import tiny_model
from tests.inside import spec_of

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class FromFolder:
    """How a family fares from folders.

    Attributes:
        loss: largest relative error of a loss computed in fp32, from either folder.
        bf16: that of a loss computed in bf16; None if transformers or the engine does not.
    """

    loss: float = 0.0
    bf16: float | None = None
    failures: list[str] = field(default_factory=list)


def from_folders(family: str, changes: dict[str, Any] | None = None) -> FromFolder:
    """Try a family from an fp32 and from a bf16 folder.

    Raises:
        InputError: the engine refuses it.
    """
    found = FromFolder()
    for stored in PRECISIONS:
        with tempfile.TemporaryDirectory() as place:
            model = tiny_model(family, changes=changes)
            folder = Path(place) / "folder"
            _save(model, folder, PRECISIONS[stored])
            source = open_source(folder)
            _compare(found, source, folder, stored)
            if stored == "bf16":
                _compare_bf16(found, source, folder)
    return found


def _save(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Save `model`, its parameters in `dtype`."""
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in exact.items():
        if name.endswith("balancing_biases"):  # zaya's `_init_weights` writes over what was loaded
            buffer[-1] = -1
    model.to(dtype)
    for name, buffer in exact.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, buffer)
    model.save_pretrained(folder)


def _loaded(folder: Path, precision: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=PRECISIONS[precision]).train()
    except ValueError:  # a part of a larger model, of whose configuration no causal model is made
        [name] = AutoConfig.from_pretrained(folder).architectures
        cls = getattr(transformers, name)
        return cls.from_pretrained(folder, dtype=PRECISIONS[precision]).train()


def _compare(found: FromFolder, source: Source, folder: Path, stored: str) -> None:
    model = _loaded(folder, "fp32")
    (first, then, _), errors = make_steps(model.config), Errors()
    settings = AdamW(lr=LR, eps=EPS)
    with Engine(source, optimizer=settings, precision="fp32", device="cpu") as engine:
        _compare_buffers(errors, engine, model)
        results = [engine.step(first)]
        reference = Reference(model, [first], 1.0)
        compare_steps(errors, results, reference)
        compare_updates(errors, dict(engine.named_masters()), reference)
        engine.save_pretrained(folder.with_name("exported"))
        still = set(source.untrained.dtypes)
        saved = folder.with_name("saved")
        if stored == "bf16":  # goes on in bf16, below
            engine.save(saved)
        elif (trip := goes_on(engine, then[:1], saved)) != EXACT:
            errors.failures.append(trip)
    _compare_export(errors, folder, model, still)
    moved = folder.rename(folder.with_name("moved"))  # a checkpoint needs it no more
    export(str(folder.with_name("saved")), folder.with_name("again"))
    moved.rename(folder)
    one, other = (tensors_of(folder.with_name(name)) for name in ("exported", "again"))
    if one.keys() != other.keys() or not all(torch.equal(one[n], other[n]) for n in one):
        errors.failures.append("export of the checkpoint is another one")
    found.loss = max(found.loss, errors.loss)
    found.failures += [f"{stored} folder: {failure}" for failure in errors.failures]


def _compare_bf16(found: FromFolder, source: Source, folder: Path) -> None:
    model, errors = _loaded(folder, "bf16"), Errors()
    step, then, _ = make_steps(model.config)
    try:
        engine = Engine(source, optimizer=AdamW(), precision="bf16", device="cpu")
    except InputError:  # rows of a table would be looked up in fp32
        return
    with engine:
        _compare_buffers(errors, engine, model)
        found.failures += [f"in bf16: {failure}" for failure in errors.failures]
        try:
            wanted = [accumulate(model, step)]
        except RuntimeError:  # transformers' own code does not run in bf16
            return
        loss = engine.step(step).loss
        if (trip := goes_on(engine, then[:1], folder.with_name("saved in bf16"))) != EXACT:
            found.failures.append(f"in bf16: {trip}")
    # Without a graph, as the engine's first forward runs, attention may be computed by another
    # kernel: where its mask needs a gradient (doge).
    with torch.no_grad():
        wanted.append(sum(share.item() for share in shares(model, step)))
    found.bf16 = min(abs(loss - each) / abs(each) for each in wanted)
    if not found.bf16 <= LOSS_TOLERANCE:
        found.failures.append(f"loss in bf16 off by {found.bf16:.1e}")


def _compare_buffers(errors: Errors, engine: Engine, model: PreTrainedModel) -> None:
    got, wanted = dict(spec_of(engine).capture.model.named_buffers()), dict(model.named_buffers())
    if got.keys() != wanted.keys():
        errors.failures.append(f"buffers {sorted(got.keys() ^ wanted.keys())[:3]}")
        return
    errors.failures += [
        f"buffer {name} is {got[name].dtype}, not {buffer.dtype}, or of other values"
        for name, buffer in wanted.items()
        if got[name].dtype != buffer.dtype or not torch.equal(got[name], buffer)
    ]


def _compare_export(errors: Errors, folder: Path, old: PreTrainedModel, still: set[str]) -> None:
    """Names, shapes and dtypes of all tensors; bits of what is not trained are `old`'s."""
    exported = folder.with_name("exported")
    new = _loaded(exported, "fp32")
    kept = still | {name for name, _ in old.named_buffers()}
    errors.failures += export_failures(folder, exported, old, new, kept)
    # What is trained has the dtype of its class, which may be wider than the folder's.
    before = tensors_of(folder)
    errors.failures += [
        f"{name} is {tensor.dtype} in the export, not {before[name].dtype}"
        for name, tensor in tensors_of(exported).items()
        if tensor.dtype != before[name].dtype and (tensor.dtype != torch.float32 or name in kept)
    ]


def export_failures(
    folder: Path, exported: Path, old: PreTrainedModel, new: PreTrainedModel, kept: set[str]
) -> list[str]:
    """How an export differs from its source in shapes, or in the bits of what is `kept`."""
    before, after = ({n: t.shape for n, t in tensors_of(f).items()} for f in (folder, exported))
    if before != after:
        names = [name for name in before | after if before.get(name) != after.get(name)]
        return [f"export has other tensors: {names[:3]}"]
    a, b = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (old, new))
    changed = [name for name in kept if not torch.equal(a[name], b[name])]
    return [f"{name} has changed in the export" for name in changed]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
