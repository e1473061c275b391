"""Prompts as tokens, what is told to generate, what is drawn, and where it stops."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatrain import InputError
from megatrain.config import ModelSection
from megatrain.data.prompts import end_of_turn, prompt_ids
from megatrain.generate import Sampling
from megatrain.generate.sampling import OwnDraws
from megatrain.generate.texts import stop_ids
from megatrain.train.resolve import run_ends
from tests.unit.data_cases import chat_tokenizer, encode_row, make_tokenizer, talk


def told(sampling, **own):
    return sampling.settings(GenerationConfig(**own), room=7, stops={2}, pad=0, cached=True)


def test_a_temperature_of_zero_or_next_to_nothing_takes_the_likeliest():
    for temperature in (0, 1e-300):
        made = told(Sampling(temperature=temperature), do_sample=True, temperature=0.7, top_p=0.8)
        assert (made.do_sample, made.temperature, made.top_p) == (False, None, None)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_a_setting_out_of_range_is_refused(wrong):
    with pytest.raises(InputError, match=rf"{next(iter(wrong))} is .*; it must be from 0 to"):
        Sampling(**wrong)


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


def test_a_text_ends_with_the_models_tokens_and_a_chat_with_its_turn_too():
    engine = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=[3]))
    tokenizer = chat_tokenizer("llama3")
    assert stop_ids(engine, tokenizer, chat=False) == {3, tokenizer.eos_token_id}
    turn = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert stop_ids(engine, tokenizer, chat=True) == {3, tokenizer.eos_token_id, turn}


def test_without_a_token_at_its_end_a_reply_ends_with_none():
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert end_of_turn(tokenizer) is None
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None


@pytest.mark.parametrize("name", ["qwen", "marked", "llama3", "mistral", "gemma"])
def test_messages_are_asked_as_they_are_trained(name):
    """The tokens before the first reply to predict are the prompt."""
    tokenizer, messages = chat_tokenizer(name), talk("What is it?", "It is 42.")
    ids, targets = encode_row(tokenizer, {"messages": messages})
    first = int(targets.argmax())
    assert prompt_ids(tokenizer, messages[:1], None, "prompt 1")[0] == ids[:first].tolist()
    with pytest.raises(InputError, match="prompt 1: ends with a reply"):
        prompt_ids(tokenizer, messages, None, "prompt 1")


def test_a_text_is_asked_as_documents_begin():
    tokenizer = make_tokenizer()
    found, _ = prompt_ids(tokenizer, "the sea", None, "prompt 1")
    assert found == tokenizer("the sea", add_special_tokens=True)["input_ids"]
    first = make_tokenizer(bos_first=True)  # what begins a text already is not put there again
    once, _ = prompt_ids(first, "The sea", None, "p")
    assert once[0] == first.bos_token_id and prompt_ids(first, "<s>The sea", None, "p")[0] == once
    with pytest.raises(InputError, match="prompt 1: holds no token"):
        prompt_ids(tokenizer, "", None, "prompt 1")


def test_a_template_may_end_replies_only_where_a_turn_follows():
    """As ChatML's of vLLM, and GLM's, whose next header is the end."""
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content + '<|im_end|>\\n'",
        "message.content + ('' if loop.last and message.role == 'assistant' else '<|im_end|>\\n')",
    )
    model = ModelSection(path="model")
    for kind in ("chat", "pairs", "prompts"):
        assert run_ends(model, tokenizer, SimpleNamespace(kind=kind)) == [tokenizer.eos_token_id]


# Tokens are drawn as transformers draws them, each row by random numbers of its own.

IDS = torch.zeros(1, 1, dtype=torch.int64)


def drawn(logits_RV, rows, seed=0, **given):
    """Tokens `[4, R]` of rows that always have the same logits."""
    settings = GenerationConfig(max_new_tokens=4, **{"temperature": 1.0, "top_k": 0} | given)
    draws = OwnDraws(settings, seed, rows, torch.device("cpu"))
    made = [draws(IDS, logits_RV) for _ in range(4)]
    assert all((each.isfinite().sum(1) == 1).all() for each in made)
    return torch.stack([each.argmax(1) for each in made])


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}]
)
def test_tokens_come_as_often_as_they_are_likely(given):
    logits = torch.tensor([[2.0, -torch.inf, 0.0, 1.0, -1.0, 1.5, 0.5, -3.0]])
    wanted = TemperatureLogitsWarper(given.get("temperature", 1.0))(IDS, logits)
    if "top_k" in given:
        wanted = TopKLogitsWarper(given["top_k"])(IDS, wanted)
    if "top_p" in given:
        wanted = TopPLogitsWarper(given["top_p"])(IDS, wanted)
    likely, count = wanted.softmax(-1)[0], 5000
    found = drawn(logits.expand(count, -1), range(count), **given)
    share = torch.bincount(found.flatten(), minlength=8) / (4 * count)
    assert ((likely == 0) == (share == 0)).all()
    spread = (likely * (1 - likely) / (4 * count)).sqrt()
    assert ((share - likely).abs() <= 5 * spread).all()


def test_a_rows_draws_are_its_own():
    """Whatever rows are beside it, and other ones at each token, row and seed."""
    logits = torch.zeros(6, 1 << 16)
    found = drawn(logits, range(6))
    assert found.unique().numel() == 24
    assert drawn(logits[:3], (4, 0, 5)).equal(found[:, [4, 0, 5]])
    assert not drawn(logits, range(6), seed=1).eq(found).any()
