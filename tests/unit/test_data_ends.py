"""Where replies begin and end does not depend on what they say."""

import numpy as np
import pytest
from data_cases import chat_tokenizer, encode_row, make_tokenizer, talk, write_jsonl
from tokenizers import AddedToken

from megatrain.data import open_dataset
from megatrain.errors import InputError

# Phi 3: the text ends once more behind the last turn.
PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
# The end of a reply is found by its signs alone: earlier ones have another end.
ENDS_LATER = PHI3.replace("'<|end|>\\n' }}", "('<|end|>\\n' if loop.last else '<|next|>\\n') }}")
# No sign shows where the content is, as it is there twice.
TWICE = PHI3.replace("+ message['content'] +", "+ message['content'] * 2 +")
MARKED = PHI3.replace(
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}",
    "{{ '<|' + message['role'] + '|>\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|end|>\\n' }}{% endif %}",
)
ALWAYS_ASKS = PHI3.replace("{% if add_generation_prompt %}", "{% if true %}")
TURNS = ("<|user|>", "<|assistant|>", "<|end|>", "<|next|>")


def phi3(template=PHI3, **options):
    """Its tokens of turns take in white space behind them where `rstrip` is given."""
    special = ("<s>", "<|endoftext|>", "<pad>")
    tokenizer = make_tokenizer(template, special=special, eos="<|endoftext|>")
    turns = [AddedToken(token, normalized=False, special=True, **options) for token in TURNS]
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    return tokenizer


def learnt(tokenizer, *contents):
    ids, targets = encode_row(tokenizer, {"messages": talk(*contents)})
    return tokenizer.decode(ids[targets])


REPLIES = ["D", "d", "e", "end", "text", "endoftext", "|", ">", "<", "|>", "<|end|>", "a", "assist"]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_that_is_a_part_of_the_end_token_ends_as_others_do(reply):
    tokenizer = phi3()
    assert learnt(tokenizer, "What?", reply) == f"{reply}<|end|>"
    assert learnt(tokenizer, reply, reply, "Why?", reply) == f"{reply}<|end|>" * 2
    if reply not in TURNS:
        assert learnt(phi3(TWICE), "What?", reply) == f"{reply * 2}<|end|>"


@pytest.mark.parametrize("reply", REPLIES[:8])
def test_a_reply_that_is_a_part_of_a_token_opens_no_other_turn(reply):
    said = learnt(phi3(ENDS_LATER), "What?", "D", "Why?", reply)
    assert said == f"D<|next|>{reply}<|end|>"


@pytest.mark.parametrize("reply", REPLIES[:10])
def test_a_reply_that_is_a_part_of_a_token_does_not_hide_that_another_is_asked_for(reply):
    tokenizer = phi3(ALWAYS_ASKS)
    with pytest.raises(InputError, match="replies cannot be told apart"):
        learnt(tokenizer, "What?", reply)


@pytest.mark.parametrize("template", [PHI3, MARKED], ids=["found", "marked"])
@pytest.mark.parametrize("space", [" ", "\n", "\n\n", "\t "])
def test_a_header_that_takes_in_the_white_space_of_a_reply_is_not_learnt(template, space):
    tokenizer = phi3(template, rstrip=True)
    said = learnt(tokenizer, "What?", f"{space}It is 42.", "Why?", f"{space}No.")
    assert said == "It is 42.<|end|>No.<|end|>"


def test_a_header_that_takes_white_space_in_is_not_learnt_in_a_text(tmp_path):
    tokenizer = phi3(rstrip=True)
    rows = [{"prompt": "<|user|>What?<|assistant|>", "completion": " It is 42."}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = open_dataset(path, tokenizer=tokenizer, sequence_length=64, cache_dir=tmp_path)
    batch = data.batch([0])
    taught = batch["input_ids"][0][batch["labels"][0] != -100]
    assert tokenizer.decode(taught) == "It is 42.<|endoftext|>"


def test_an_ordinary_token_over_the_border_of_a_reply_is_learnt():
    tokenizer = chat_tokenizer("qwen")
    header = "<|im_start|>assistant\n"
    first = tokenizer(f"{header}    return a")["input_ids"][len(tokenizer(header)["input_ids"]) - 1]
    assert tokenizer.decode(first).startswith("\n ")  # the text that was learnt has such a token
    ids, targets = encode_row(tokenizer, {"messages": talk("Hello", "    return a")})
    assert ids[np.flatnonzero(targets)[0]] == first
