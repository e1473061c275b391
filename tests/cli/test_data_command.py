"""`megatrain data`: a person sees what will be trained, without the model's weights."""

import json

import pytest
from transformers import AutoConfig

from megatrain.data import load_tokenizer
from tests.cli.cases import change_run, sets, tiny_llama

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chats(tmp_path, tokenizer_folder, run_file):
    """The run file of a model folder without weights, on questions, one of them twice."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.chat_template = TEMPLATE
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    AutoConfig.for_model(**tiny_llama(vocab_size=len(tokenizer))).save_pretrained(model)
    rows = [{"question": f"the cat {i % 4}", "answer": f"a <dog> {i % 4}"} for i in range(5)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = {"path": str(tmp_path / "rows.json"), "sequence_length": 32, "packing": False}
    return change_run(run_file, model={"path": str(model)}, data=data, training__eval_every=None)


def test_counts_lengths_and_rows_are_shown(megatrain, chats, tmp_path):
    result = megatrain.done("data", chats, "--rows", 5)
    said = result.stdout
    assert "training: 5 conversations (questions and answers) in 5 rows of 32 tokens" in said
    assert "1 of the conversations repeats another: " in said
    for i in range(4):
        assert f"<user>the cat {i}|\n<assistant>⟦a <dog> {i}|\n⟧" in said
    assert f"tokens by source in {tmp_path}/\n" in said
    assert "\n-- rows.json:1: " in said and "row 5 (" in said
    assert "row 2 (" not in megatrain("data", chats, "--rows", 1).stdout
    assert not (tmp_path / "run").exists()


def test_what_is_cut_off_or_left_out_is_said(megatrain, chats, tmp_path, caplog):
    rows = [{"question": "the cat", "answer": "a dog " * n} for n in (1, 60)]
    rows += [{"question": "the cat " * 60, "answer": "a dog"}, {"question": "a"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    megatrain.done("data", chats, *sets(data__bad_rows="skip"))
    for part in (
        "truncated 2 of 3 conversations, which are longer than sequence_length 32",
        "dropped 1 of 3 conversations, which have no reply",
        "left out 1 bad rows:",
    ):
        assert part in caplog.text, part


def test_text_is_shown_with_its_evaluation(megatrain, run_file):
    result = megatrain.done("data", run_file, "--rows", 1)
    assert "documents (text) in" in result.stdout and "evaluation: " in result.stdout
    assert "the cat sat on the mat" in result.stdout.replace("⟦", "").replace("⟧", "")


def test_a_template_of_the_run_file_takes_the_place_of_the_tokenizers(megatrain, chats, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE.replace("user", "USER").replace("|", "#"))
    given = sets(model__chat_template=str(template))
    assert "⟦a <dog> 0#\n⟧" in megatrain("data", chats, "--rows", 5, *given).stdout
    change_run(chats, model={"config": tiny_llama(), "tokenizer": str(tmp_path / "model")})
    result = megatrain.done("train", chats, *given, *sets(training__steps=1))
    assert load_tokenizer(tmp_path / "run" / "model").chat_template == template.read_text()
    for content, problem in ((b"", "is empty"), (b"\xff", "not UTF-8"), (None, "No such file")):
        template.unlink(missing_ok=True)
        if content is not None:
            template.write_bytes(content)
        result = megatrain("data", chats, *given)
        assert result.exit_code == 2 and problem in result.stderr and "own.jinja" in result.stderr
