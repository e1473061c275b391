"""Prompts as tokens, what `generate` is told, and where it stops."""

from types import SimpleNamespace

import pytest
from data_cases import chat_tokenizer, encode_row, make_tokenizer, talk
from transformers import GenerationConfig

from megatrain import InputError
from megatrain.config import ModelSection
from megatrain.data.prompts import end_of_turn, prompt_ids
from megatrain.generate import Sampling
from megatrain.train.data import run_ends


def told(sampling, **own):
    return sampling.settings(GenerationConfig(**own), room=7, stops={2}, pad=0, cached=True)


def test_a_temperature_of_zero_or_next_to_nothing_takes_the_likeliest():
    for temperature in (0, 1e-300):
        made = told(Sampling(temperature=temperature), do_sample=True, temperature=0.7, top_p=0.8)
        assert (made.do_sample, made.temperature, made.top_p) == (False, None, None)


def test_what_is_not_said_is_as_the_model_says_or_usual():
    own = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    made = told(Sampling(top_p=0.5), **own)
    assert (made.temperature, made.top_p, made.top_k) == (0.7, 0.5, 20)
    assert (made.repetition_penalty, made.max_new_tokens, made.eos_token_id) == (1.05, 7, [2])
    made = told(Sampling(top_k=3))
    assert (made.do_sample, made.temperature, made.top_p, made.top_k) == (True, 0.8, 0.95, 3)


def test_settings_of_a_folder_that_are_not_followed_are_said_once(caplog):
    for _ in range(2):
        made = told(Sampling(), num_beams=4, guidance_scale=1.5, max_length=9, top_k=1)
    assert (made.num_beams, made.guidance_scale) == (None, None)
    [line] = [each.getMessage() for each in caplog.records if "megatrain" in each.name]
    assert line.endswith("that are not followed: guidance_scale, num_beams")


ENDS = {"qwen": "<|im_end|>", "marked": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>",
        "gemma": "<end_of_turn>"}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_reply_is_found_in_the_template(name):
    tokenizer = chat_tokenizer(name)
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(ENDS[name])


def test_a_text_that_begins_as_the_tokenizer_would_begin_it_gets_no_second_beginning():
    tokenizer = make_tokenizer(bos_first=True)
    once = prompt_ids(tokenizer, "The sea", None, "p")
    assert once[0] == tokenizer.bos_token_id
    assert prompt_ids(tokenizer, "<s>The sea", None, "p") == once


def test_without_a_token_at_its_end_a_reply_ends_with_none():
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert end_of_turn(tokenizer) is None
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None


@pytest.mark.parametrize("name", ENDS)
def test_messages_are_asked_as_they_are_trained(name):
    """The tokens before the first reply to predict are the prompt."""
    tokenizer, messages = chat_tokenizer(name), talk("What is it?", "It is 42.")
    ids, targets = encode_row(tokenizer, {"messages": messages})
    first = int(targets.argmax())
    assert prompt_ids(tokenizer, messages[:1], None, "prompt 1") == ids[:first].tolist()
    with pytest.raises(InputError, match="prompt 1: ends with a reply"):
        prompt_ids(tokenizer, messages, None, "prompt 1")


def test_a_text_is_asked_as_documents_begin():
    tokenizer = make_tokenizer()
    found = prompt_ids(tokenizer, "the sea", None, "prompt 1")
    assert found == tokenizer("the sea", add_special_tokens=True)["input_ids"]
    with pytest.raises(InputError, match="prompt 1: holds no token"):
        prompt_ids(tokenizer, "", None, "prompt 1")
    with pytest.raises(InputError, match="prompt 1: message 1 has no 'role'"):
        prompt_ids(chat_tokenizer("qwen"), [{"content": "a"}], None, "prompt 1")


def test_a_template_may_end_replies_only_where_a_turn_follows():
    """As ChatML's of vLLM, and GLM's, whose next header is the end."""
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content + '<|im_end|>\\n'",
        "message.content + ('' if loop.last and message.role == 'assistant' else '<|im_end|>\\n')",
    )
    model = ModelSection(path="model")
    assert run_ends(model, tokenizer, SimpleNamespace(kind="chat")) == [tokenizer.eos_token_id]
