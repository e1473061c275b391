"""From chats to a model that replies and stops, by the template's own end of turn."""

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from megatrain.cli.app import app
from tests.cli.cases import TALK, sets

OPTIONS = ["--max-new-tokens", "20", "--temperature", "0", "--device", "cpu", "--precision", "fp32"]


def test_a_base_model_trained_on_chats_stops_at_the_end_of_a_turn(base, talker):
    tokenizer = AutoTokenizer.from_pretrained(talker / "model")
    before, after = (GenerationConfig.from_pretrained(f) for f in (base, talker / "model"))
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    assert before.eos_token_id == tokenizer.eos_token_id
    assert after.eos_token_id == [turn, before.eos_token_id]
    model = AutoModelForCausalLM.from_pretrained(talker / "model")
    asked = tokenizer.apply_chat_template(
        TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**asked, do_sample=False, max_new_tokens=20)
    reply = made[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "on the mat<|turn|>"


def test_it_can_be_talked_to(talker, tmp_path):
    for place in (talker, next((talker / "checkpoints").iterdir())):
        result = CliRunner().invoke(
            app, ["chat", str(place), *OPTIONS], input="the cat sat\n/reset\nthe cat sat\n\n"
        )
        assert result.exit_code == 0, result.output
        assert result.stdout.count("on the mat\n") == 2 and "<|turn|>" not in result.stdout
    asked = ["--chat", "--prompt", "the cat sat", *OPTIONS]
    result = CliRunner().invoke(app, ["generate", str(talker), *asked])
    assert result.stdout == "on the mat\n"


def test_another_end_token_ends_texts_and_is_written(megatrain, run_file, tmp_path, base):
    chosen = {"model__config": None, "model__tokenizer": None, "model__path": str(base)}
    chosen |= {"training__steps": 1, "training__eval_every": None}
    result = megatrain("train", run_file, *sets(**chosen, model__eos_token="<|turn|>"))
    assert result.exit_code == 0, result.output
    model = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == "<|turn|>"
    assert GenerationConfig.from_pretrained(model).eos_token_id[0] == tokenizer.eos_token_id
    chosen |= {"model__eos_token": "<|turm|>", "output__folder": str(tmp_path / "other")}
    result = megatrain("train", run_file, *sets(**chosen))
    assert result.exit_code == 2
    assert "model.eos_token: no token '<|turm|>'; did you mean '<|turn|>'?" in result.stderr
