"""What a tile, a buffer or a piece of work is, is data: plans do not hang on how it is called."""

from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256

import pytest
import torch

from megatrain import Placement
from megatrain.autoplace.fits import check_fits
from megatrain.autoplace.search import fastest
from megatrain.device import CpuDevice
from megatrain.device.base import Name
from megatrain.errors import DoesNotFit
from megatrain.forecast import needs, simulate
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.plan.tiles import tile_bytes
from megatrain.tile import TileLayout
from tests.sweeps import few
from tests.unit.forecast_cases import small_machine, tiny_spec, wide_spec

WORKLOAD = Workload(4 * 32, 32)
HEAVY = {"chunk_tokens": 16, "layer_inputs": "host", "save_attention": "host"}
CASES = {
    "resident": (tiny_spec, Placement(slots=3, offload_activations=2), (0, 3, 7)),
    "chunked": (tiny_spec, Placement(**HEAVY, offload_activations=2), ()),
    "split head": (wide_spec, Placement(max_stream_bytes=1_700_000), ()),
}


MADE = set[str]()


def other(name):
    """Another text for a label: letters that say nothing; a text made here stays as it is."""
    digest = sha256(name.encode()).hexdigest().translate(str.maketrans("0123456789", "ghijklmnop"))
    text = name if name in MADE else digest
    MADE.add(text)
    return Name(name.kind, text) if isinstance(name, Name) else text


@contextmanager
def renamed():
    """Within, every tile, and all that is put on a device that plans, is called something else."""
    made = TileLayout.__init__

    def init(self, name, *rest, **named):
        made(self, other(name), *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileLayout, "__init__", init)
        for module, name in ((simulate, "ClockDevice"), (needs, "_Counting")):
            device = getattr(module, name)

            class Renaming(device):
                def empty(self, name, *rest):
                    return super().empty(other(name), *rest)

                def host(self, name, *rest, **more):
                    return super().host(other(name), *rest, **more)

                def run(self, stream, name, *rest, **more):
                    return super().run(stream, other(name), *rest, **more)

            patch.setattr(module, name, Renaming)
        yield


def both(ask):
    """An answer, and the answer with other names; what they are made of is made anew."""
    with renamed():
        again = ask()
    return ask(), again


@pytest.mark.parametrize("case", few(CASES, 0, 1, 3))
def test_forecasts_and_their_memory_are_those_of_other_names(case):
    spec, placement, resident = CASES[case]

    def ask():
        cache, machine = ForecastCache(spec()), small_machine()
        layouts = cache.model(WORKLOAD).layouts
        placed = replace(placement, resident=tuple(layouts[i].name for i in resident))
        found, there = cache.of(machine, placed, WORKLOAD, 2), cache.needs(WORKLOAD, placed)
        tiles = [
            (tile.count, tile.tier, tile.planes) for tile in tile_bytes(spec(), placed, WORKLOAD)
        ]
        told = found.seconds, found.bounds, found.breakdown.idle, found.device_bytes
        return told, found.host_bytes, there.device, there.host, tiles

    one, again = both(ask)
    assert one == again


def test_what_is_chosen_is_what_would_be_chosen_with_other_names():
    def ask():
        cache, machine = ForecastCache(tiny_spec(2)), small_machine(device_mib=30)
        found = fastest(cache, machine, WORKLOAD)
        names = [layout.name for layout in cache.model(WORKLOAD).layouts]
        where = tuple(names.index(name) for name in found.placement.resident)
        assert 0 < len(where) < 4, "that some tiles are chosen is what is tried here"
        return where, replace(found.placement, resident=()), found.seconds

    one, again = both(ask)
    assert one == again


def test_what_is_refused_is_refused_with_other_names():
    def ask():
        class Card(CpuDevice):
            kind = "cuda"

            def memory(self):
                return {**super().memory(), "device_free_bytes": 2 << 20}

        model = ForecastCache(wide_spec()).model(WORKLOAD)
        with pytest.raises(DoesNotFit) as refused:
            check_fits(Card(), model, Placement(), torch.bfloat16, None, clip=True)
        return str(refused.value)

    one, again = both(ask)
    assert one == again
