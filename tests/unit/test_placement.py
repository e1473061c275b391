"""What a placement may be."""

from typing import Any

import pytest
import yaml

from megatrain import InputError, Placement
from megatrain.config.schema import EngineSection
from megatrain.placement import RENAMED, renamed

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"slots": 0}, "slots is 0; it must be >= 1"),
    ({"slots": 10**9}, "slots is 1000000000; it must be <= 10,000"),
    ({"gradient_lanes": 10**6}, "gradient_lanes is 1000000; it must be <= 10,000"),
    ({"slots": 2.0}, "slots is 2.0; it must be an integer"),
    ({"slots": "2"}, "slots is '2'; it must be an integer"),
    ({"slots": True}, "slots is True; it must be an integer"),
    ({"slots": None}, "slots is None; it must be an integer"),
    ({"host_grad_buffers": 0}, "host_grad_buffers is 0; it must be >= 1"),
    ({"layer_input_lanes": -1}, "layer_input_lanes is -1; it must be >= 1"),
    ({"head_tokens": 0}, "head_tokens is 0; it must be >= 1"),
    ({"save_activations": -1}, "save_activations is -1; it must be >= 0"),
    ({"update_threads": 0}, "update_threads is 0; it must be >= 1"),
    ({"prefetch": -1}, "prefetch is -1; it must be >= 0"),
    ({"slots": 3, "prefetch": 3}, "prefetch is 3; with 3 slots it must be between 0 and 2"),
    ({"prefetch": "1"}, "prefetch is '1'; it must be an integer"),
    ({"gradient_lanes": 0}, "gradient_lanes is 0; it must be >= 1"),
    ({"keep_rows": 1}, "keep_rows is 1; it must be true or false"),
    ({"layer_inputs": "disk"}, "layer_inputs is 'disk'; it must be 'device' or 'host'"),
    ({"resident": "head"}, "resident is 'head'; it must be a list of tile names"),
    ({"resident": 2}, "resident is 2; it must be a list of tile names"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED)
def test_impossible_choices_are_refused_in_one_line(choices, message):
    with pytest.raises(InputError) as caught:
        Placement(**choices)
    assert str(caught.value) == f"placement.{message}"


def test_prefetch_is_as_far_as_the_slots_reach():
    assert [Placement(slots=n).prefetch_distance for n in (1, 2, 5)] == [0, 1, 4]
    assert Placement(slots=5, prefetch=2).prefetch_distance == 2
    assert Placement(slots=5, prefetch=0).prefetch_distance == 0


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(slots=3, layer_inputs="host", resident=("embedding", "layer 0"), keep_rows=False),
        Placement(compile=True, chunk_tokens=8192, save_attention="host", save_bytes=0),
    ],
)
def test_a_placement_is_shown_as_a_run_file_takes_it(placement):
    assert EngineSection(placement=yaml.safe_load(str(placement))).placement_value() == placement
    assert "host_grad_buffers" not in str(placement)


def test_a_placement_goes_through_plain_data():
    placement = Placement(slots=3, layer_inputs="host", resident=("head",))
    assert Placement(**placement.as_dict()) == placement
    assert set(placement.as_dict()) == set(Placement.names())
    with pytest.raises(AttributeError):
        placement.slots = 4


@pytest.mark.parametrize("old", RENAMED)
def test_a_run_file_with_an_earlier_name_is_told_today_s(old):
    value = getattr(Placement(), RENAMED[old])
    with pytest.raises(ValueError, match=f"'{old}' is now called '{RENAMED[old]}'"):
        EngineSection(placement={old: value})
    assert EngineSection(placement={RENAMED[old]: value}).placement_value() == Placement()


def test_earlier_names_of_saved_choices_are_read():
    placement = Placement(slots=3, layer_inputs="host", save_activations=2, offload_activations=1)
    today, earlier = placement.as_dict(), {new: old for old, new in RENAMED.items()}
    saved = {earlier.get(name, name): value for name, value in today.items()}
    assert saved.keys() - today.keys() == RENAMED.keys()
    assert Placement(**renamed(saved)) == Placement(**renamed(today)) == placement
