"""What other tools make of an exported model; each where it is installed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tests.cli.cases import TALK

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def exported(megatrain, talker, tmp_path):
    """The model that was trained on one talk."""
    result = megatrain("export", talker, tmp_path / "exported")
    assert result.exit_code == 0, result.output
    return tmp_path / "exported"


def test_a_pipeline_of_transformers_replies_and_stops(exported):
    generate = pipeline("text-generation", model=str(exported))
    [made] = generate(TALK[:1], max_new_tokens=20, do_sample=False)
    assert made["generated_text"] == TALK


def test_peft_trains_an_adapter_on_it(exported, tmp_path):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(exported)
    chosen = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, chosen)
    ids = AutoTokenizer.from_pretrained(exported)("the cat", return_tensors="pt")["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert all(torch.isfinite(g).all() for g in gradients) and any(g.any() for g in gradients)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(exported), tmp_path / "adapter"
    )
    assert again(input_ids=ids).logits.equal(model.eval()(input_ids=ids).logits)
