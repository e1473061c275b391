"""Each causal-LM family of transformers trains as in plain torch, or is refused with a reason."""

import pytest

from megatrain import AdamW, Engine, InputError
from tests.families.examine import NOT_TRAINED, PASSES, REFUSED, examine
from tests.families.folders import from_folders
from tests.families.plain import make_steps, plain_training
from tests.families.report import documented, documents_this_version
from tests.families.roundtrip import EXACT, WRONG, round_trips
from tests.families.sizes import VARIANTS
from tests.families.tiny import NOT_TRAINABLE, families, tiny_model
from tests.sweeps import quick

# Of each kind of trouble that tests/parity does not compare with plain torch one: what is new to
# the engine in it stands beside it.
USUAL = {
    "gemma2": "soft-capped logits, scaled and tied embeddings, two windows",
    "deepseek_v3": "latent attention, dense then expert layers, a correction bias in a buffer",
    "mamba": "no attention",
    "bloom": "layers return tuples",
    "bert": "an encoder's layers, a transformed head with a tied bias",
    "bart": "half of each decoder layer is never used",
    "xlnet": "tokens before rows",
    "gemma4": "a wrapper that embeds a copy of the tokens, and one token besides",
}
QUICK_VARIANTS = ["opt with layers left out", "zamba2 with several hybrid layers"]


@pytest.mark.parametrize("name", quick([*families(), *VARIANTS], {*USUAL, *QUICK_VARIANTS}))
def test_a_family_trains_as_in_plain_torch_or_is_refused(name):
    found = examine(*VARIANTS.get(name, (name, None)), name)
    assert found.result in (PASSES, REFUSED, NOT_TRAINED), found.reason
    assert "\n" not in found.reason
    if documents_this_version():
        assert (found.result, found.reason) == documented()[name], "docs/models.md: `make models`"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", NOT_TRAINABLE)
def test_torch_cannot_train_these_either(family):
    with pytest.raises((ImportError, ValueError)):
        model = tiny_model(family)
        plain_training(model, make_steps(model.config))


@pytest.mark.skipif(not documents_this_version(), reason="docs/models.md is of another version")
def test_the_document_names_every_family():
    results = {name: result for name, (result, _) in documented().items()}
    assert set(results) == {*families(), *VARIANTS}
    assert sum(results[family] == PASSES for family in families()) >= 150
    assert set(results.values()) <= {PASSES, REFUSED, NOT_TRAINED}


def test_tokens_that_only_the_model_knows_are_refused():
    """A multimodal wrapper replaces its placeholders; their rows are not among the batch's."""
    model = tiny_model("gemma4_unified")
    whole = make_steps(model.config)[0][-1]  # without padding, which is what they are replaced by
    whole["input_ids"][0, 0] = model.config.image_token_id
    with (
        Engine(model, optimizer=AdamW(), precision="fp32", device="cpu") as engine,
        pytest.raises(InputError, match="looks up token 0, which the batch does not hold"),
    ):
        engine.step([whole])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [family for family in families() if family not in NOT_TRAINABLE])
def test_every_checkpoint_goes_on_in_another_process(family):
    found = round_trips(tiny_model(family))
    assert not [text for text in found.values() if text.startswith(WRONG)], found
    assert found["module"] == EXACT or documented()[family][0] != PASSES, found


@pytest.mark.parametrize("name", quick([*families(), *VARIANTS], ["deepseek_v3", "minimax_m2"]))
def test_every_family_from_folders(name):
    if documented()[name][0] != PASSES:
        pytest.skip("does not pass")
    family, changes = VARIANTS.get(name, (name, None))
    assert not from_folders(family, changes).failures
