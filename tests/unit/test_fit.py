"""What `placement="auto"` does with a device's memory."""

import pytest
import torch

from megatrain.autoplace import fit
from megatrain.device import CpuDevice
from megatrain.engine import kept_graphs
from megatrain.placement import Placement
from megatrain.tile import TileLayout
from megatrain.units import GIB


class Gpu(CpuDevice):
    """A GPU as far as its memory goes."""

    kind = "cuda"

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def memory(self) -> dict[str, int]:
        return {"device_free_bytes": self.free_bytes, "device_bytes": 0}


def layouts(layers: int = 10, numel: int = 1 << 20) -> list[TileLayout]:
    """Tiles of 14 MiB of state each (bf16)."""
    names = ["embedding", "prologue", *(f"layer {i}" for i in range(layers)), "head", "unused"]
    return [
        TileLayout(name, [("w", torch.Size([0 if name == "prologue" else numel]), 0)])
        for name in names
    ]


def auto(free: int, tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> Placement:
    monkeypatch.setattr(fit, "can_compile", lambda: True)
    return fit.initial_placement(
        Gpu(free), layouts(), train=True, bf16=True, tokens_per_step=tokens
    )


def test_everything_rests_on_a_device_with_twice_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = auto(2 * 12 * 14 << 20, 98_304, monkeypatch)
    assert len(placement.resident) == 13 and "unused" not in placement.resident


def test_large_steps_start_on_resident_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = auto(20 * 14 << 20, 98_304, monkeypatch)
    assert placement.resident == ("embedding", "prologue", "layer 0")


def test_small_steps_hold_half_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = auto(20 * 14 << 20, 4096, monkeypatch)
    assert placement.resident == ("embedding", "prologue", *(f"layer {i}" for i in range(9)))


def test_a_small_card_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto(2 * 14 << 20, None, monkeypatch).resident == ()


def test_without_a_compiler_nothing_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "can_compile", lambda: False)
    placement = fit.initial_placement(
        Gpu(1 << 40), layouts(), train=True, bf16=True, tokens_per_step=None
    )
    assert not placement.compile and placement.resident == ()


def kept(spare: float) -> kept_graphs.KeptGraphs:
    """After two steps of 1000 tokens: 50 GiB without kept graphs, 2 GiB a graph."""
    graphs = kept_graphs.KeptGraphs(28, int((50 * GIB + spare * GIB) / kept_graphs._USABLE))
    assert graphs.choose(1000) == 0
    graphs.note(1000, 50 * GIB)
    assert graphs.choose(1000) == 1
    graphs.note(1000, 52 * GIB)
    return graphs


def test_as_many_graphs_are_kept_as_fit() -> None:
    assert kept(40.5).choose(1000) == 20


def test_larger_steps_keep_fewer_and_smaller_ones_no_more_than_there_are() -> None:
    graphs = kept(40.5)
    assert graphs.choose(1500) == 5  # 75 GiB without, 3 GiB a graph
    assert graphs.choose(10_000) == 0
    assert graphs.choose(10) == 28


def test_no_graph_is_tried_without_room() -> None:
    graphs = kept_graphs.KeptGraphs(28, 80 * GIB)
    graphs.choose(1000)
    graphs.note(1000, 70 * GIB)
    assert graphs.choose(1000) == 0
