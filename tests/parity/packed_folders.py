"""Folders of packed weights: how one is written, and that it trains as what it stands for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain import Engine, Placement
from megatrain.train.export import export
from tests.inside import store_of
from tests.parity.cases import make_batches, make_engine, masters, same

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
[STEP, LATER] = make_batches(2)


def write(folder: Path, tensors: dict[str, Tensor], how: dict[str, Any]) -> None:
    """Let a folder hold these tensors, and its config.json say `how` they are quantised."""
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))


def assert_trains_as(folder: Path, plain: Path, place: Path, **options: Any) -> list[Any]:
    """An adapter on a packed folder trains, resumes and merges as on the folder of its values.

    Returns the entries of the packed model.
    """
    how: dict[str, Any] = {"adapter": LORA, "precision": "bf16", "clip": 1e9}
    with make_engine(plain, **how) as engine:
        expected, first = engine.step(STEP), masters(engine)
        later, last = engine.step(LATER).loss, masters(engine)
        engine.save_pretrained(place / "plain merged", merged=True)
    for placement in (Placement(slots=1), Placement(slots=2, resident=("layer 1",), passes=2)):
        with make_engine(folder, placement=placement, **how, **options) as engine:
            entries = [entry for _, entry in store_of(engine).entries()]
            got = engine.step(STEP)
            assert (got.loss, got.grad_norm) == (expected.loss, expected.grad_norm)
            assert same(masters(engine), first)
            engine.save(place / "saved")
    with Engine.load(place / "saved", device="cpu") as engine:
        assert engine.step(LATER).loss == later and same(masters(engine), last)
        engine.save_pretrained(place / "merged", merged=True)
        engine.save_pretrained(place / "adapter")
    export(str(place / "adapter"), place / "whole", merged=True)
    assert "quantization_config" not in json.loads((place / "whole" / "config.json").read_text())
    merged, whole, wanted = (
        load_file(place / name / "model.safetensors")
        for name in ("merged", "whole", "plain merged")
    )
    assert same(merged, whole) and same({name: merged[name] for name in wanted}, wanted)
    assert all(torch.isfinite(tensor).all() for tensor in merged.values())
    return entries


def share_of_bf16(entries: list[Any]) -> float:
    """How many bytes packed entries take, in parts of what they take in bf16."""
    kept = [entry for entry in entries if entry.needs_unpacking]
    return sum(entry.stored for entry in kept) / sum(entry.numel for entry in kept)
