"""Memory limits: what cannot fit is refused before anything is allocated."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain import AdamW, DoesNotFit, Engine, InputError, Placement
from megatrain.device import Buffer, CpuDevice
from megatrain.engine.assemble import open_source, tile_layouts
from megatrain.engine.budget import Question, smallest
from megatrain.model.probe import outline
from megatrain.optim import StreamedOptimizer
from megatrain.telemetry.memory import process_bytes
from megatrain.units import GIB, MIB
from tests.parity.cases import llama, make_engine
from tests.parity.test_memory import MID
from tests.unit.forecast_cases import experts_config


class Card(CpuDevice):
    """A GPU as far as its memory goes; counts what it has handed out."""

    kind = "cuda"

    def __init__(self, size: int) -> None:
        self.size, self.taken, self.on_host = size, 0, 0

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.taken += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        self.on_host += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)

    def limit(self, device_bytes: int | None, host_bytes: int | None) -> None:
        self.size = min(self.size, device_bytes or self.size)
        self._host_limit = host_bytes

    def memory(self) -> dict[str, int]:
        free = self.size - self.taken - 1 * MIB
        return {**super().memory(), "device_free_bytes": free, "device_context_bytes": MIB}


def question(tokens: int | None = None, config: Any = MID) -> Question:
    model = open_source(config).model
    optimizer = StreamedOptimizer(AdamW(), model)
    found = outline(model)
    layouts = tile_layouts(found, optimizer.group_of())
    return Question(found, layouts, torch.bfloat16, optimizer, 1.0, tokens)


def open_engine(
    device: Card, model: Any = MID, placement: Placement | None = None, **options: Any
) -> Engine:
    placement = placement or Placement(slots=3)
    return Engine(model, optimizer=AdamW(), device=device, placement=placement, **options)


def test_a_card_that_is_too_small_is_refused_with_nothing_allocated() -> None:
    device = Card(8 * GIB)
    with pytest.raises(DoesNotFit) as told:
        open_engine(device, device_memory="20MiB")
    assert device.taken == device.on_host == 0
    assert "\n" not in str(told.value)
    for part in ("device memory: at least", "are allowed", "too few", "the least for this model"):
        assert part in str(told.value)


def test_what_is_counted_is_what_is_taken() -> None:
    device = Card(8 * GIB)
    device.kind = "cpu"  # there is no GPU to draw weights on
    placement = Placement(slots=3)
    engine = open_engine(device)
    needs = question().needs(placement)
    temporary = needs.device.pop("gradient of the head")
    assert temporary == 2 * 16384 * 384
    assert device.taken == sum(needs.device.values())
    assert device.on_host == sum(needs.host.values())
    engine.close()


def test_rows_and_boundaries_count_where_the_tokens_are_known() -> None:
    unknown, known = question().needs(Placement()), question(4096).needs(Placement())
    assert sum(known.host.values()) - sum(unknown.host.values()) == 2 * 4096 * 384  # staged rows
    assert known.device["boundaries"] == 2 * 4096 * 384 * 5


def test_the_least_for_a_model_with_experts_is_with_split_layers() -> None:
    """A layer takes 5 MB, all but its experts 0.4."""
    frugal = smallest(Placement())
    with pytest.raises(DoesNotFit) as whole:
        open_engine(Card(8 * GIB), experts_config(), frugal, device_memory="10MiB")
    split = int(str(whole.value).rpartition("split_bytes: ")[2].removesuffix(")"))
    asked = question(None, experts_config())
    assert sum(asked.needs(frugal).device.values()) > 10 * MIB
    assert sum(asked.needs(replace(frugal, split_bytes=split)).device.values()) < 4 * MIB


def test_the_smallest_placement_takes_the_least() -> None:
    asked = question(4096)
    least = sum(asked.needs(smallest(Placement(slots=6))).device.values())
    for placement in (Placement(slots=1), Placement(slots=2, keep_rows=False), Placement(slots=6)):
        assert least < sum(asked.needs(placement).device.values())


def test_host_memory_is_refused_before_it_is_taken() -> None:
    device = Card(8 * GIB)
    with pytest.raises(DoesNotFit, match=r"host memory: at least .* weights .* too few"):
        open_engine(device, host_memory=process_bytes() + 100 * MIB)
    assert device.on_host == 0


def test_host_memory_that_grows_beyond_its_limit_is_refused() -> None:
    device = CpuDevice()
    device.limit(None, process_bytes() + 64 * MIB)
    device.host("small", MIB, torch.uint8, pinned=True)
    with pytest.raises(DoesNotFit, match="no host memory for large"):
        device.host("large", 512 * MIB, torch.uint8, pinned=True)


@pytest.mark.parametrize("value", ["ten", "-3GiB", 0, -5, 1.5, True, ""])
def test_a_limit_that_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="host_memory is"):
        make_engine(llama(), host_memory=value)


def test_device_memory_is_for_a_gpu() -> None:
    with pytest.raises(InputError, match="device_memory limits a GPU"):
        make_engine(llama(), device_memory="10GiB")
