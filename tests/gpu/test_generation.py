"""Generation on a GPU: streamed and resident, as transformers does it there."""

import pytest
import torch

from megatrain import Engine, Placement
from tests.families.tiny import tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "bloom", "falcon_h1"])
def test_tokens_are_those_of_transformers(family, tmp_path):
    model = tiny_model(family).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    told = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0,
            "eos_token_id": None}  # fmt: skip
    streamed = Engine(tmp_path / "model", precision="fp32", device="cuda", placement=Placement())
    model.cuda()
    wanted = model.generate(ids, attention_mask=mask, **told)
    for spare in (None, 0):
        with streamed.whole_model(spare=spare) as whole:
            assert whole.generate(ids, attention_mask=mask, **told).equal(wanted)
    streamed.close()
