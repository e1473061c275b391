"""Chats become tokens of which exactly the assistant's are to predict."""

import json
import logging

import numpy as np
import pytest
from tokenizers import AddedToken

from megatrain.data import open_dataset, reply_spans
from megatrain.data.conversation import messages
from megatrain.errors import InputError
from tests.refusals import refused
from tests.unit.data_cases import (
    QWEN,
    ROWS,
    chat_tokenizer,
    encode_row,
    make_tokenizer,
    spoken,
    talk,
    write_jsonl,
)

TWO_TURNS = talk("What is 12 + 30?", "It is 42.", "Thanks!", "You are welcome: naïve café ☕")
REPLIES = {
    "qwen": ["It is 42.<|im_end|>", "You are welcome: naïve café ☕<|im_end|>"],
    "marked": ["It is 42.<|im_end|>", "You are welcome: naïve café ☕<|im_end|>"],
    "llama3": ["It is 42.<|eot_id|>", "You are welcome: naïve café ☕<|eot_id|>"],
    "mistral": ["It is 42.</s>", "You are welcome: naïve café</s>"],
    "gemma": ["It is 42.<end_of_turn>", "You are welcome: naïve café<end_of_turn>"],
}


def dataset(tmp_path, tokenizer, rows, **options):
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    options = {"sequence_length": 256, "packing": False, **options}
    return open_dataset(
        path, kind="chat", tokenizer=tokenizer, cache_dir=tmp_path / "cache", **options
    )


@pytest.mark.parametrize("name", REPLIES)
def test_only_replies_with_their_end_of_turn_are_learnt(name):
    tokenizer = chat_tokenizer(name)
    messages = TWO_TURNS if name not in ("mistral", "gemma") else talk(
        *(m["content"].replace(" ☕", "") for m in TWO_TURNS)
    )  # fmt: skip
    ids, _ = encode_row(tokenizer, {"messages": messages})
    assert ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    runs = spoken(tokenizer, {"messages": messages})[1]
    assert [run.lstrip() for run in runs] == REPLIES[name]


def test_marks_in_the_template_decide_over_prefixes():
    # Only the marked template leaves the closing token out here, so prefixes would differ.
    tokenizer = chat_tokenizer("marked")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}{{",
        "message['content'] }}{% endgeneration %}{{ '<|im_end|>' +",
    )
    assert spoken(tokenizer, {"messages": TWO_TURNS})[1][0] == "It is 42."
    first = [m | {"weight": 0} if m["content"].startswith("You") else m for m in TWO_TURNS]
    assert spoken(tokenizer, {"messages": first})[1] == ["It is 42."]


def test_tools_reach_the_template_and_tool_calls_are_learnt(tmp_path):
    tokenizer = chat_tokenizer("qwen")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "The weather is sunny."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        data = dataset(
            tmp_path, tokenizer, [{"messages": messages, "tools": given}], sequence_length=512
        )
        batch = data.batch([0])
        text = tokenizer.decode(batch["input_ids"][0])
        assert "# Tools" in text and '"name": "weather"' in text and "None" not in text
        learnt = batch["input_ids"][0][batch["labels"][0] != -100].numpy()
        assert tokenizer.decode(learnt).replace("\n", "") == (
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call><|im_end|>'
            "The weather is sunny.<|im_end|>"
        )


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (talk("a", "b", system="s"), "Conversation roles must alternate"),
        ([{"role": "assistant", "content": "a"}], "begins with a reply|must alternate"),
    ],
)
def test_a_row_that_the_template_refuses_is_named(messages, problem):
    with pytest.raises(InputError, match=f"rows.jsonl:1.*({problem})"):
        encode_row(chat_tokenizer("mistral"), {"messages": messages})


@pytest.mark.parametrize("problem", ROWS["malformed"])
def test_malformed_rows_name_file_line_and_problem(tmp_path, problem):
    rows = [{"messages": TWO_TURNS}, ROWS["malformed"][problem]]
    with refused(rf"chat.jsonl:2.*{problem}"):
        dataset(tmp_path, chat_tokenizer("qwen"), rows)


def test_parts_with_reasoning_and_calls_say_what_fields_of_their_own_say():
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    said = {"role": "assistant", "content": "let me look", "tool_calls": [call]}
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "let me look"},
             {"type": "tool_call", "value": json.dumps(call)}]  # fmt: skip
    read, learnt = messages([*talk("a"), {"role": "assistant", "content": parts}], "messages", "r")
    assert learnt == [False, True]
    assert read[1] == messages([{**said, "reasoning_content": "hm"}], "messages", "r")[0][0]
    for bad, problem in (
        ([{"type": "image_url", "value": "a.jpg"}], "part that is not read: 'image_url'"),
        ([{"type": ["text"], "text": "a"}], "part that is not read"),
        ([{"type": "text", "text": None}], "part that is not read: 'text'"),
        (["a"], "part that is not read: 'str'"),
        ([{"type": "tool_call", "value": "no"}], "'tool_calls' must each have a function"),
    ):
        with pytest.raises(InputError, match=problem):
            messages([{"role": "assistant", "content": bad}], "messages", "r")
    with pytest.raises(InputError, match="'tool_calls' is also in a part"):
        messages([{**said, "content": parts}], "messages", "r")
    with pytest.raises(InputError, match="not read: 'reasoning'"):
        messages([{"role": "user", "content": parts[:1]}], "messages", "r")


def test_rows_without_a_reply_are_dropped_with_one_warning_or_refused_if_all(tmp_path, caplog):
    silent = {"messages": talk("nobody answers")}
    rows = [{"messages": TWO_TURNS}, silent, silent]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the second time from the kept tokens
            caplog.clear()
            data = dataset(tmp_path, chat_tokenizer("qwen"), rows)
            assert len(data) == 1
            (message,) = (r.getMessage() for r in caplog.records)
            assert "dropped 2 of 3 conversations" in message and "chat.jsonl:2" in message
    with pytest.raises(InputError, match="none of the 2 rows"):
        dataset(tmp_path, chat_tokenizer("qwen"), [silent, silent])


def test_overlong_conversations_are_truncated_dropped_or_refused(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "megatrain.data")  # a run before may have set another
    tokenizer = chat_tokenizer("qwen")
    lasting = talk("a", "It is 42. " * 30)
    late = talk("Tell me a short story about the sea. " * 30, "no")  # its reply is cut off whole
    rows = [{"messages": TWO_TURNS}, {"messages": lasting}, {"messages": late}]
    settings = {"sequence_length": 96, "packing": True}
    data = dataset(tmp_path, tokenizer, rows, **settings)
    assert data.row_lengths.max() == 96 and len(data) == 2
    assert [r.getMessage()[:25] for r in caplog.records] == [
        "truncated 2 of 3 conversa", "dropped 1 of 3 conversati",
    ]  # fmt: skip
    for row in range(2):
        assert (data.batch([row])["labels"] != -100).any()
    caplog.clear()
    dropped = dataset(tmp_path, tokenizer, rows, overlong="drop", **settings)
    assert [r.getMessage()[:25] for r in caplog.records] == ["dropped 2 of 3 conversati"]
    assert len(dropped) == 1 and "chat.jsonl:1" in dropped.describe(0)
    assert dropped.fingerprint != data.fingerprint
    with pytest.raises(InputError, match=r"2 conversations are longer.*chat.jsonl:2 has \d+"):
        dataset(tmp_path, tokenizer, rows, overlong="error", **settings)


def test_chat_needs_a_template_that_can_be_traced(tmp_path):
    with pytest.raises(InputError, match="no chat template"):
        dataset(tmp_path, make_tokenizer(None), [{"messages": TWO_TURNS}])
    path = tmp_path / "chat.txt"
    path.write_text("hello")
    with pytest.raises(InputError, match="must be rows: .jsonl"):
        open_dataset(path, kind="chat", tokenizer=make_tokenizer(QWEN), sequence_length=8,
                     cache_dir=tmp_path)  # fmt: skip


HOSTILE = {
    "a long output": ("{{ 'x' * 70_000_000 }}", "makes 70,000,000 characters"),
    "a wide field": ("{{ '%0999999999999d' % 1 }}", ""),
    "deep nesting": ("{{ " + "(" * 9999 + ")" * 9999 + " }}", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name):
    source, reason = HOSTILE[name]
    with pytest.raises(InputError, match=f"chat template.*{reason}"):
        encode_row(make_tokenizer(source), {"messages": TWO_TURNS})


# Where replies begin and end does not depend on what they say.

# Phi 3: the text ends once more behind the last turn.
PHI3, MARKED = (chat_tokenizer(name).chat_template for name in ("phi3", "marked phi3"))
# The end of a reply is found by its signs alone: earlier ones have another end.
ENDS_LATER = PHI3.replace("'<|end|>\\n' }}", "('<|end|>\\n' if loop.last else '<|next|>\\n') }}")
# No sign shows where the content is, as it is there twice.
TWICE = PHI3.replace("+ message['content'] +", "+ message['content'] * 2 +")
ALWAYS_ASKS = PHI3.replace("{% if add_generation_prompt %}", "{% if true %}")
TURNS = ("<|user|>", "<|assistant|>", "<|end|>", "<|next|>")


def phi3(template=PHI3, **options):
    """Its tokens of turns take in white space behind them where `rstrip` is given."""
    tokenizer = chat_tokenizer("phi3")
    tokenizer.chat_template = template
    turns = [AddedToken(token, normalized=False, special=True, **options) for token in TURNS]
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    return tokenizer


def learnt(tokenizer, *contents):
    return "".join(spoken(tokenizer, {"messages": talk(*contents)})[1])


PARTS = ["D", "d", "e", "end", "text", "endoftext", "|", ">", "<", "|>", "<|end|>", "a", "assist"]


@pytest.mark.parametrize("reply", PARTS)
def test_a_reply_that_is_a_part_of_a_token_ends_as_others_do_and_opens_no_turn(reply):
    """Nor does it hide that a template always asks for another reply."""
    tokenizer = phi3()
    assert learnt(tokenizer, "What?", reply) == f"{reply}<|end|>"
    assert learnt(tokenizer, reply, reply, "Why?", reply) == f"{reply}<|end|>" * 2
    if reply not in TURNS:
        assert learnt(phi3(TWICE), "What?", reply) == f"{reply * 2}<|end|>"
    if reply in PARTS[:10]:
        with pytest.raises(InputError, match="replies cannot be told apart"):
            learnt(phi3(ALWAYS_ASKS), "What?", reply)
    if reply in PARTS[:8]:
        said = learnt(phi3(ENDS_LATER), "What?", "D", "Why?", reply)
        assert said == f"D<|next|>{reply}<|end|>"


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


def test_conversations_may_have_more_messages_than_there_are_signs(monkeypatch):
    monkeypatch.setattr(reply_spans, "_PRIVATE", range(0xE000, 0xE004))  # for two messages
    assert learnt(phi3(), "What?", "D", "Why?", "E") == "D<|end|>E<|end|>"
    without_third = PHI3.replace(
        "+ message['content'] +", "+ ('' if loop.index == 3 else message['content']) +"
    )
    with pytest.raises(InputError, match="leaves out message 3"):
        learnt(phi3(without_third), "What?", "D", "Why?", "E")


def test_an_ordinary_token_over_the_border_of_a_reply_is_learnt():
    tokenizer = chat_tokenizer("qwen")
    header = "<|im_start|>assistant\n"
    first = tokenizer(f"{header}    return a")["input_ids"][len(tokenizer(header)["input_ids"]) - 1]
    assert tokenizer.decode(first).startswith("\n ")  # the text that was learnt has such a token
    ids, targets = encode_row(tokenizer, {"messages": talk("Hello", "    return a")})
    assert ids[np.flatnonzero(targets)[0]] == first
