"""Every family trains from a folder as it does where transformers has loaded it."""

import pytest
import torch

from tests.families import folders
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


def test_a_rounded_buffer_and_a_changed_export_are_noticed(monkeypatch):
    """The comparison itself."""

    def rounded(folder, precision):
        model = original(folder, precision)
        for buffer in model.buffers():
            if buffer.dtype == torch.float32:
                buffer.copy_(buffer.bfloat16())
        return model

    original = folders._loaded
    monkeypatch.setattr(folders, "_loaded", rounded)
    failures = from_folders("deepseek_v3").failures
    assert any("e_score_correction_bias is torch.float32" in text for text in failures)
