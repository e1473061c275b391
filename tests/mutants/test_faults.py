"""The planted faults fit the code as it is."""

import pytest

from tests.mutants.faults import FAULTS, Fault
from tests.structure.source_tree import PACKAGE, ROOT


def test_there_are_fifty() -> None:
    assert len(FAULTS) >= 50 and len({(fault.file, fault.old) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.breaks)
def test_it_can_be_planted(fault: Fault) -> None:
    text = (PACKAGE / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"change `old` of {fault.breaks!r} with the code it breaks"
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert all((ROOT / "tests" / name).exists() for name in fault.tests)
