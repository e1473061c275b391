"""What other tools make of an exported model; each where it is installed."""

import shutil
import subprocess
import sys

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


def test_lm_eval_scores_it(exported):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=1)
    prompt = model.apply_chat_template(TALK[:1])
    asked = [
        Instance("loglikelihood", {}, (prompt, answer), number)
        for number, answer in enumerate(["on the mat", "to the dog"])
    ]
    (right, greedy), (wrong, _) = model.loglikelihood(asked, disable_tqdm=True)
    assert greedy and right > wrong
    until = {"until": ["<|turn|>"], "max_gen_toks": 20, "do_sample": False}
    [said] = model.generate_until(
        [Instance("generate_until", {}, (prompt, until), 0)], disable_tqdm=True
    )
    assert said == "on the mat"


# The converter knows tokenizers of byte pairs by a list, in which the test's is not.
CONVERT = """
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).resolve().parent))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_llama_cpp_converts_all_of_it(exported, tmp_path):
    """`convert_hf_to_gguf.py` of llama.cpp (from June 2026) on the path, and the package gguf."""
    gguf, script = pytest.importorskip("gguf"), shutil.which("convert_hf_to_gguf.py")
    if script is None:
        pytest.skip("llama.cpp's convert_hf_to_gguf.py is not on the path")
    out = tmp_path / "model.gguf"
    command = [sys.executable, "-c", CONVERT, script, str(exported), "--outfile", str(out)]
    done = subprocess.run([*command, "--outtype", "f32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(out).tensors}
    model = AutoModelForCausalLM.from_pretrained(exported)
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for theirs, weight in model.named_parameters():
        name = names.get_name(theirs, (".weight",))
        if number := heads.get(name.split(".")[-2]):  # rotated in pairs there, in halves here
            weight = weight.unflatten(0, (number, 2, -1)).transpose(1, 2).reshape(weight.shape)
        assert written.pop(name).equal(weight), name
    assert not written
