"""Each multimodal family of transformers trains on its media as in plain torch, or says why not."""

import pytest

from megatrain.model.trained import Trained
from tests.families.examine import NOT_TRAINED, PASSES, REFUSED
from tests.families.examine_media import NOT_TRIED, TEXT_ALONE, examine_media
from tests.families.media import families, media_steps
from tests.families.parity import compare
from tests.families.report import documented_media, documents_this_version
from tests.families.tiny import tiny_multimodal
from tests.sweeps import quick

REPRESENTATIVE = {
    "qwen2_5_vl": "positions of three kinds, windows in the tower, videos",
    "gemma3": "token types, tied embeddings, sliding windows",
    "llava_next": "images in tiles of several sizes",
    "idefics3": "a list of images for each row, a tower whose weights text asks for their dtype",
    "llama4": "a projector that the forward calls apart from the tower",
    "kimi_k25": "a tower whose results its caller changes",
    "glmasr": "sounds",
}


# The others train in parity/test_packed_media.py and in runs, too.
QUICK = ("llava_next", "llama4", "kimi_k25", "glmasr")


@pytest.mark.parametrize("family", quick(families(), QUICK))
def test_family(family):
    """Exhaustively also with its encoders trained."""
    found = examine_media(family, quick=family in REPRESENTATIVE)
    assert found.result in (PASSES, TEXT_ALONE, REFUSED, NOT_TRAINED, NOT_TRIED), found.reason
    assert "\n" not in found.reason
    if documents_this_version():
        assert (found.result, found.reason) == documented_media()[family], "`make models`"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_a_representative_family_with_its_encoders_trained(family):
    found = examine_media(family)
    assert (found.result, found.all_trained) == (PASSES, ""), found.reason


PROJECTORS = {"qwen2_5_vl": "merger", "gemma3": "projector", "idefics3": "connector"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", PROJECTORS)
def test_a_projector_trained_alone(family):
    model = tiny_multimodal(family)
    steps = media_steps(model, family)
    most = max(len(micro) for step in steps for micro in step)
    # Text alone reaches no projector, and plain torch has no backward then.
    with_media = [[micro for micro in step if len(micro) == most] for step in steps]
    steps = [step for step in with_media if step]
    alone = Trained(train_only=[PROJECTORS[family]])
    assert not compare(model, steps=steps, chosen=alone).failures


@pytest.mark.skipif(not documents_this_version(), reason="docs/models.md is of another version")
def test_the_document_names_every_family():
    assert documented_media().keys() == {*families()}
