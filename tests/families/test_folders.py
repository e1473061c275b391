"""Every family trains from a folder as it does where transformers has loaded it."""

import pytest

from tests.families.examine import PASSES
from tests.families.folders import from_folders
from tests.families.report import documented
from tests.families.sizes import VARIANTS
from tests.families.tiny import families
from tests.sweeps import quick


@pytest.mark.parametrize(
    "name", quick([*families(), *VARIANTS], ["deepseek_v3", "gptj", "minimax_m2"])
)
def test_every_family_from_folders(name):
    if documented()[name][0] != PASSES:
        pytest.skip("does not pass")
    family, changes = VARIANTS.get(name, (name, None))
    assert not from_folders(family, changes).failures
