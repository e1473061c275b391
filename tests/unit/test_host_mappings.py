"""Memory of planes: in huge pages, and no forked child's."""

import torch

from megatrain.base.units import MIB
from megatrain.device.cpu import host_range
from tests.forks import forked


def flags_of(address):
    """What the kernel notes of the mapping that an address lies in."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            name, *values = line.split()
            if "-" in name:
                start, stop = (int(end, 16) for end in name.split("-"))
                inside = start <= address < stop
            elif inside and name == "VmFlags:":
                return set(values)
    raise AssertionError(f"{address:x} is not mapped")


def test_planes_ask_for_huge_pages_and_stay_with_their_process():
    planes = host_range("planes", MIB, torch.uint8)
    flags = flags_of(planes.data_ptr())
    assert "hg" in flags
    assert "sh" not in flags  # shared memory has small pages, whatever is asked for
    planes.fill_(1)

    def child():
        # Its address is taken, so that a child that drops the planes unmaps nothing else.
        assert flags_of(planes.data_ptr()) and not planes.any()

    assert forked(child) == 0
    assert planes.all()
