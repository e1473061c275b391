"""Each multimodal family of transformers trains on its media as in plain torch, or says why not."""

import pytest

from tests.families.examine import NOT_TRAINED, PASSES, REFUSED
from tests.families.examine_media import NOT_TRIED, TEXT_ALONE, examine_media
from tests.families.media import families
from tests.families.report import documented_media, documents_this_version

REPRESENTATIVE = {
    "qwen2_5_vl": "positions of three kinds, windows in the tower, videos",
    "gemma3": "token types, tied embeddings, sliding windows",
    "llava_next": "images in tiles of several sizes",
    "idefics3": "a list of images for each row, a tower whose weights text asks for their dtype",
    "llama4": "a projector that the forward calls apart from the tower",
    "kimi_k25": "a tower whose results its caller changes",
    "glmasr": "sounds",
}


@pytest.mark.parametrize(
    ("family", "alone"),
    [("glmasr", True)]  # images train in parity/test_media.py, too
    + [pytest.param(family, False, marks=pytest.mark.exhaustive) for family in families()],
)
def test_family(family, alone):
    """Exhaustively also with its encoders trained."""
    found = examine_media(family, quick=alone)
    assert found.result in (PASSES, TEXT_ALONE, REFUSED, NOT_TRAINED, NOT_TRIED), found.reason
    assert "\n" not in found.reason
    if family in REPRESENTATIVE and not alone:
        assert (found.result, found.all_trained) == (PASSES, ""), found.reason
    if documents_this_version():
        assert (found.result, found.reason) == documented_media()[family], "`make models`"


@pytest.mark.skipif(not documents_this_version(), reason="docs/models.md is of another version")
def test_the_document_names_every_family():
    assert documented_media().keys() == {*families()}
