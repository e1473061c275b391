"""`megatrain generate`: where prompts come from, and where texts go."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from megatrain.cli.app import app
from tests.cli.cases import MISTAKES, TALK, change_run, sets
from tests.unit.data_cases import write_jsonl

OPTIONS = ["--max-new-tokens", "4", "--temperature", "0", "--device", "cpu", "--precision", "fp32"]
PROMPTS = ["the cat", "a dog ran"]


def test_prompts_of_options_and_files_are_continued_together(megatrain, trained, tmp_path):
    folder, _ = trained
    wanted = [
        megatrain.done("generate", folder, "--prompt", each, *OPTIONS).stdout.strip()
        for each in PROMPTS
    ]
    given = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    printed = megatrain("generate", folder, *given, *OPTIONS).stdout
    assert [text.strip() for text in printed.split("--- ")[1:]] == [
        f"{prompt}\n{text.removeprefix(prompt)}".strip()
        for prompt, text in zip(PROMPTS, wanted, strict=True)
    ]
    (tmp_path / "prompts.txt").write_text("\n".join([PROMPTS[0], "", PROMPTS[1]]) + "\n")
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    for name in ("prompts.txt", "prompts.jsonl"):
        out = tmp_path / f"{name}.out"
        asked = ["--prompts", tmp_path / name, "--output", out, "--batch-size", "1"]
        assert megatrain("generate", folder, *asked, *OPTIONS).exit_code == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["prompt"] + row["completion"] for row in rows] == wanted
        before, told = out.read_bytes(), f"{name}.out: holds something already"
        megatrain.refused(told, "generate", folder, *asked, *OPTIONS)
        assert out.read_bytes() == before


def test_each_batch_draws_other_random_numbers(megatrain, trained, tmp_path):
    same = ["--prompt", "the cat"] * 4
    drawn = [*OPTIONS, "--temperature", "9", "--top-p", "1", "--batch-size", "2"]
    out = tmp_path / "out.jsonl"
    megatrain.done("generate", trained[0], *same, *drawn, "--output", out)
    rows = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
    assert len({*rows}) == 4


@pytest.mark.parametrize("problem", MISTAKES["prompts"])
def test_prompts_that_cannot_be_used(megatrain, trained, tmp_path, problem):
    for content in MISTAKES["prompts"][problem]:
        path = tmp_path / "p.jsonl"
        if content is not None:
            path.write_bytes(content.encode("latin-1"))
        megatrain.refused(problem, "generate", trained[0], "--prompts", path, *OPTIONS)


def test_a_context_with_less_room_than_was_asked_for_is_named(megatrain, trained, caplog):
    given = ["--prompt", "a", "--prompt", "the cat", *OPTIONS, "--max-new-tokens", "100"]
    assert megatrain("generate", trained[0], *given).exit_code == 0
    told = "prompt 2: 2 tokens leave room for 62 new ones in a context of 64, not 100"
    assert told in caplog.text
    told = "leave no room in a context of 64"
    megatrain.refused(told, "generate", trained[0], "--prompt", "the cat " * 40, *OPTIONS)


@pytest.mark.parametrize("drawn", [(), ("--temperature", "0")], ids=["drawn", "likeliest"])
def test_what_is_no_number_is_said(megatrain, trained, tmp_path, drawn):
    """In a configuration, and in weights: torch draws of NaN with a traceback, or token 0."""
    model, options = tmp_path / "model", ["--prompt", "the cat", *OPTIONS[:2], *OPTIONS[4:], *drawn]
    shutil.copytree(trained[0] / "model", model)
    config = json.loads((model / "config.json").read_text())
    damaged = config | {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}
    (model / "config.json").write_text(json.dumps(damaged))
    told = "config.json: rope_parameters.rope_theta is NaN; correct it"
    megatrain.refused(told, "generate", model, *options)
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    told = "error: the model's logits are NaN or infinite, so no token can be"
    megatrain.refused(told, "generate", model, *options, code=4)


# From chats to a model that replies and stops, by the template's own end of turn.


CHATTING = ["--max-new-tokens", "20", *OPTIONS[2:]]


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


def test_a_merged_adapter_stops_at_the_end_of_a_turn(megatrain, run_file, base, tmp_path):
    """So does what another run makes of the adapter's folder, which PEFT writes without."""
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": TALK}] * 8)
    lora = {"method": "lora", "r": 2, "target_modules": ["q_proj"]}
    change_run(run_file, model={"path": str(base)}, data={"path": str(chats)}, adapter=lora)
    short = sets(training__steps=1, training__eval_every=None, data__sequence_length=32)
    megatrain.done("train", run_file, *short)
    for place in ("", "checkpoints/step-00000001"):
        megatrain.done("export", tmp_path / "run" / place, tmp_path / f"out{place[:3]}", "--merged")
    for name in ("run/model", "out", "outche"):
        ends = GenerationConfig.from_pretrained(tmp_path / name).eos_token_id
        assert len(ends) == 2 and ends[1] == GenerationConfig.from_pretrained(base).eos_token_id


def test_it_can_be_talked_to(talker):
    for place in (talker, next((talker / "checkpoints").iterdir())):
        result = CliRunner().invoke(
            app, ["chat", str(place), *CHATTING], input="the cat sat\n/reset\nthe cat sat\n\n"
        )
        assert result.exit_code == 0, result.output
        assert result.stdout.count("on the mat\n") == 2 and "<|turn|>" not in result.stdout
    asked = ["--chat", "--prompt", "the cat sat", *CHATTING]
    result = CliRunner().invoke(app, ["generate", str(talker), *asked])
    assert result.stdout == "on the mat\n"


def test_another_end_token_ends_texts_and_is_written(megatrain, run_file, tmp_path, base):
    model = {"path": str(base), "eos_token": "<|turn|>"}
    short = {"training__steps": 1, "training__eval_every": None}
    megatrain.done("train", run_file, *sets(model=model, **short))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ends = GenerationConfig.from_pretrained(tmp_path / "run" / "model").eos_token_id
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|turn|>", ends[0])
