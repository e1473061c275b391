"""Templates that write a turn otherwise when more follows, and that take messages in other shapes.

Each is a small one of our own with a habit of a well-known model's.
"""

import pytest

from megatrain.data.prompts import end_of_turn
from megatrain.errors import InputError
from tests.refusals import refused
from tests.unit import data_cases
from tests.unit.data_cases import TEMPLATES as TABLE
from tests.unit.data_cases import (
    chat_tokenizer,
    make_tokenizer,
    one_line,
    shaped_tokenizer,
    talk,
)

SPECIAL = ("<s>", "</s>", "<pad>", "<|a|>", "<|u|>", "<|end|>", "<|stop|>", "<think>", "</think>",
           "<|call|>", "<|tool|>")  # fmt: skip
FOR = "{%- for m in messages %}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|a|>' }}{%- endif %}"
OTHERS = "{%- if m.role != 'assistant' %}{{- '<|u|>' + m.role + ' ' + m.content + '<|end|>' }}"
CALL = (
    "{%- for c in m.tool_calls or [] %}{{- '<|call|>' + c.function.name + ' ' + (ARGS) }}"
    "{%- endfor %}"
)

TEMPLATES = {name: one_line(written) for name, written in TABLE["replies"].items()}


def spoken(template, row, tokenizer=None):
    """The whole text, and the runs of it that are learnt."""
    return data_cases.spoken(tokenizer or make_tokenizer(template, special=SPECIAL), row)


TURNS = talk("ask 1", "tell 2", "ask 3", "tell 4", system="be 0")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("white", ["", "\n", "  "])
def test_replies_with_their_end_are_found_and_the_text_is_the_templates(name, white):
    turns = [{**m, "content": m["content"] + white} for m in TURNS]
    tokenizer = make_tokenizer(TEMPLATES[name], special=SPECIAL)
    whole, (first, last) = spoken(TEMPLATES[name], {"messages": turns}, tokenizer)
    if "parts" not in name:
        assert whole == tokenizer.apply_chat_template(turns, tokenize=False)
    end = "<|u|>" if "no end" in name else "<|end|>"  # the next turn's header, as GLM's
    assert first.strip() == ("tell 2" + white).strip() + white + end
    begin = "<think></think>" if "drops" in name else "</think>" if "beginning" in name else ""
    end = "<|stop|>" if "otherwise" in name else "" if "no end" in name else end
    assert last.strip() == (begin + "tell 4" + white).strip() + white * bool(end) + end


def test_reasoning_is_learnt_under_whatever_name_the_template_has_for_it():
    template = TEMPLATES["drops reasoning of earlier replies"]
    for theirs in ("reasoning_content", "reasoning", "thinking"):
        for name in ("reasoning_content", "reasoning", "thinking"):
            turns = [dict(m) for m in TURNS]
            turns[-1][name] = "hm"
            _, runs = spoken(template.replace("reasoning_content", theirs), {"messages": turns})
            assert runs == ["tell 2<|end|>", "<think>hm</think>tell 4<|end|>"]
    turns[-1]["content"], turns[-1]["thinking"] = "<think>hm</think>tell 4", None
    with pytest.raises(InputError, match="leaves out message 5"):  # as DeepSeek R1's does
        spoken(template, {"messages": turns})


def with_calls(**arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [*TURNS[:2], {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "warm", "name": "weather"}, *TURNS[2:]]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("c.function.arguments | tojson", '{"city": "Paris"}'),
        ("c.function.arguments", '{"city": "Paris"}'),  # a string in its place
        ("c.function.arguments ~ ''", '{"city": "Paris"}'),  # Python's way to write an object
        ("(c.function.arguments.values() | list)[0]", "Paris"),
    ],
)
@pytest.mark.parametrize("content", ["(m.content or '')", "m.content"])
def test_calls_are_written_as_the_template_takes_them(arguments, written, content):
    reply = "{%- else %}{{- '<|a|>' + " + content + " }}" + CALL.replace("ARGS", arguments)
    template = FOR + OTHERS.replace("m.content", "(m.name or '') + m.content")
    template += reply + "{{- '<|end|>' }}{%- endif %}" + END
    _, runs = spoken(template, {"messages": with_calls(city="Paris")})
    assert runs == [f"<|call|>weather {written}<|end|>", "tell 2<|end|>", "tell 4<|end|>"]


def said(turns, place, **more):
    """The turns, of which one says more."""
    return [turn | more if turn is turns[place] else turn for turn in turns]


def calls_of(city):
    return with_calls(city=city)[2]["tool_calls"]


CALLED, ASKED = with_calls(city="a"), talk("ask 1", "tell 2", "ask 3", "tell 4", "ask 5")
MORE = {"role": "assistant", "content": "tell 5"}
THOUGHT = said(CALLED, 2, reasoning_content="hm")
THINKING = said(TURNS, -1, thinking="hm")
TALKS = {
    "turns": TURNS,
    "turns and more": [*TURNS, MORE],
    "turns without a system prompt": TURNS[1:],
    "turns and a thought": said(TURNS, -1, thinking="hm "),
    "turns and reasoning": said(TURNS, -1, reasoning="hm"),
    "turns and reasoning content": said(TURNS, -1, reasoning_content="hm"),
    "turns and thinking": THINKING,
    "a question and thinking": THINKING[-2:],
    "turns and a header of a word": said(TURNS, -1, content="say: I say"),
    "turns and a header of a line": said(TURNS, -1, content="I say:\n I say"),
    "two replies in a row": [*TURNS[:3], MORE, *TURNS[3:]],
    "three questions": ASKED,
    "a question last, with a system prompt": [*TURNS[:1], *ASKED],
    "a question last": ASKED[:3],
    "an empty reply": talk("a", "", "b", "tell"),
    "words of the vocabulary": talk("a", "the story", "b", "the sea"),
    "a quotation": talk("say <|assistant|>\nhm\n<|end|>", "hm"),
    "calls": CALLED,
    "calls alone": CALLED[:3],
    "calls and more": [*CALLED, MORE],
    "calls and a header": [*CALLED, {**MORE, "content": "tell <|a|> 5"}],
    "calls without a system prompt": CALLED[1:],
    "calls beside words": said(CALLED, 2, content="see here"),
    "calls after reasoning": THOUGHT,
    "calls and a reply after reasoning": said(THOUGHT, -1, reasoning_content="hm"),
    "two calls": said(CALLED, 2, tool_calls=calls_of("Paris") + calls_of("Rome")),
}


def shaped(habit):
    """The tokenizer of a row of the table, the row that it is given, and what is said of it."""
    shape = {"special": SPECIAL, **habit}
    told = {
        key: shape.pop(key, None) for key in ("turns", "row", "learnt", "holds", "ends", "refused")
    }
    row = {"messages": TALKS[told["turns"]], **(told["row"] or {})}
    return shaped_tokenizer(**shape), row, told


@pytest.mark.parametrize("name", TABLE["habits"])
def test_replies_and_calls_are_learnt_to_their_ends_and_nothing_of_others(name):
    tokenizer, row, told = shaped(TABLE["habits"][name])
    whole, learnt = spoken(None, row, tokenizer)
    assert learnt == told["learnt"] and (told["holds"] or "") in whole
    if told["ends"]:
        assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == told["ends"]


@pytest.mark.parametrize("name", TABLE["unfit"])
def test_what_a_template_leaves_out_or_does_not_tell_apart_is_refused(name):
    tokenizer, row, told = shaped(TABLE["unfit"][name])
    with refused(f"^rows.jsonl:1: .*({told['refused']})"):
        spoken(None, row, tokenizer)


def test_no_part_of_the_next_header_is_learnt_where_a_template_always_asks_for_another_reply():
    """As the first of Llama 3."""
    tokenizer = chat_tokenizer("llama3")
    written = tokenizer.chat_template
    tokenizer.chat_template = written.replace("{% if add_generation_prompt %}", "{% if true %}")
    _, runs = spoken(None, {"messages": TURNS}, tokenizer)
    assert runs == ["tell 2<|eot_id|>", "tell 4<|eot_id|>"]
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_empty_replies_the_end_of_turn_is_learnt(name):
    ends = [run[-7:] for run in spoken(TEMPLATES[name], {"messages": talk("a", "", "b", "")})[1]]
    last = "<|stop|>"[-7:] if "otherwise" in name else "<|end|>"
    assert ends == (["<|u|>"] if "no end" in name else ["<|end|>", last])
