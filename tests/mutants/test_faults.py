"""The planted faults fit the code as it is."""

import pytest

from tests.mutants.faults import FAULTS
from tests.structure.source_tree import PACKAGE, ROOT


def test_there_are_fifty():
    assert len(FAULTS) >= 50 and len({fault.old for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.breaks)
def test_it_can_be_planted(fault):
    file = fault.place(PACKAGE)  # else change `old` with the code that it breaks
    compile(file.read_text(encoding="utf-8").replace(fault.old, fault.new), str(file), "exec")
    assert all((ROOT / "tests" / name).exists() for name in fault.tests)
