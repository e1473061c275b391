"""Templates that write a turn otherwise when more follows, and that take messages in other shapes.

Each is a small one of our own with a habit of a well-known model's.
"""

import pytest

from megatrain.data.encoders import Encoder, PlacedExample
from megatrain.data.prompts import end_of_turn
from megatrain.data.rows import Reading
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

READING = Reading("auto", {})
SPECIAL = ("<s>", "</s>", "<pad>", "<|a|>", "<|u|>", "<|end|>", "<|stop|>", "<think>", "</think>",
           "<|call|>", "<|tool|>")  # fmt: skip
FOR = "{%- for m in messages %}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|a|>' }}{%- endif %}"
OTHERS = "{%- if m.role != 'assistant' %}{{- '<|u|>' + m.role + ' ' + m.content + '<|end|>' }}"
CALL = (
    "{%- for c in m.tool_calls or [] %}{{- '<|call|>' + c.function.name + ' ' + (ARGS) }}"
    "{%- endfor %}"
)
REPLY = "{%- else %}{{- '<|a|>' + m.content + '<|end|>' }}{%- endif %}"

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


def test_reasoning_that_a_template_writes_beside_calls_alone_is_learnt_there():
    """As Gemma 4's and Command R7B's."""
    reply = "{{- '<|a|>' + ('<think>' + (m.reasoning or '') if m.tool_calls else m.content) }}"
    template = MACRO + FOR + OTHERS + "{%- else %}" + reply + (
        "{{- calls(m) + '<|end|>' }}{%- endif %}"
    ) + END  # fmt: skip
    turns = [dict(message) for message in with_calls(city="a")]
    turns[2]["reasoning_content"] = "hm"
    _, runs = spoken(template, {"messages": turns})
    assert runs[0] == '<think>hm<|call|>weather {"city": "a"}<|end|>' and len(runs) == 3
    turns[-1]["reasoning_content"] = "hm"
    with pytest.raises(InputError, match=r"message 7: .* no place for 'reasoning_content'"):
        spoken(template, {"messages": turns})


def test_reasoning_that_a_setting_of_the_row_turns_on_is_learnt_then_alone():
    thinking = "{{- '<|a|>' + (m.thinking or '' if loud else '') + m.content + '<|end|>' }}"
    template = FOR + OTHERS + "{%- else %}" + thinking + "{%- endif %}" + END
    encoder = Encoder(make_tokenizer(template, special=SPECIAL), None)
    turns = [*TURNS[:-1], {**TURNS[-1], "thinking": "hm "}]
    for loud in (False, True):
        row = {"messages": turns, "chat_template_kwargs": {"loud": loud}}
        example, _ = READING.example(READING.find(row, "r:1"), row, "r:1")
        if loud:
            assert encoder.conversation(PlacedExample(0, 1, "r:1", example)).targets.any()
        else:
            with pytest.raises(InputError, match="no place for 'thinking'"):
                encoder.conversation(PlacedExample(0, 1, "r:1", example))


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


MACRO = (
    "{%- macro calls(m) %}" + CALL.replace("ARGS", "c.function.arguments | tojson")
    + "{%- endmacro %}"
)  # fmt: skip

CALLED = with_calls(city="a")
MORE = {"role": "assistant", "content": "tell 5"}
TALKS = {
    "turns": TURNS,
    "turns and more": [*TURNS, MORE],
    "two replies in a row": [*TURNS[:3], MORE, *TURNS[3:]],
    "calls": CALLED,
    "calls alone": CALLED[:3],
    "calls and more": [*CALLED, MORE],
    "calls and a header": [*CALLED, {**MORE, "content": "tell <|a|> 5"}],
    "a quotation": talk("say <|assistant|>\nhm\n<|end|>", "hm"),
    "a question last": talk("ask 1", "tell 2", "ask 3"),
}


@pytest.mark.parametrize("name", TABLE["habits"])
def test_replies_and_calls_are_learnt_to_their_ends_and_nothing_of_others(name):
    habit = {"special": SPECIAL, **TABLE["habits"][name]}
    turns, learnt = TALKS[habit.pop("turns")], habit.pop("learnt")
    tokenizer = shaped_tokenizer(**habit)
    assert spoken(None, {"messages": turns}, tokenizer)[1] == learnt


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


def test_a_family_that_begins_and_ends_parts_of_a_reply_as_it_does_turns_is_learnt_to_its_end():
    """As Kimi K3's, whose last token alone ends a turn."""
    special = ("<s>", "</s>", "<pad>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    macros = (
        "{%- macro o(tag) %}{{- '<|open|>' + tag + '<|sep|>' }}{%- endmacro %}"
        "{%- macro c(tag) %}{{- '<|close|>' + tag + '<|sep|>' }}{%- endmacro %}"
    )
    header = "{{- o('message role=\"assistant\"') + o('think') }}"
    template = macros + FOR + (
        "{%- if m.role != 'assistant' %}{{- o('message role=' + m.role) + m.content }}{%- else %}"
    ) + header + (
        "{{- (m.reasoning or '') + c('think') + o('say') + m.content + c('say') }}{%- endif %}"
        "{{- c('message') + '<|end_of_msg|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    ) + header + "{%- endif %}"  # fmt: skip
    tokenizer = make_tokenizer(template, special=special)
    turns = [*TURNS[:-1], {**TURNS[-1], "reasoning": "hm"}]
    _, runs = spoken(template, {"messages": turns}, tokenizer)
    said = "<|close|>think<|sep|><|open|>say<|sep|>{}<|close|>say<|sep|><|close|>message<|sep|>"
    assert runs == [
        said.format("tell 2") + "<|end_of_msg|>", "hm" + said.format("tell 4") + "<|end_of_msg|>",
    ]  # fmt: skip
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|end_of_msg|>")


@pytest.mark.parametrize("marked", [False, True])
def test_tokens_that_hold_a_part_of_a_reply_are_learnt(marked):
    """All bytes of its last character, and a first word with the space that ends the header."""
    reply = "m.content + ' 漢'"
    said = "{%- generation %}{{- " + reply + " }}{%- endgeneration %}" if marked else (
        "{{- " + reply + " }}"
    )  # fmt: skip
    template = FOR + OTHERS.replace("<|u|>", "ask:") + (
        "{%- else %}{{- 'say: ' }}" + said + "{{- '<|end|>' }}{%- endif %}"
    ) + END.replace("<|a|>", "say: ")  # fmt: skip
    _, runs = spoken(template, {"messages": talk("a", "the story", "b", "the sea")})
    end = "" if marked else "<|end|>"
    assert [run.lstrip() for run in runs] == [f"the story 漢{end}", f"the sea 漢{end}"]


def test_an_end_that_only_a_question_brings_is_learnt_where_it_is():
    """As Apertus' and Hunyuan's; GLM's has a question's header there, and no other end."""
    for end in ("<|end|>", ""):
        asks = "{%- if m.role == 'user' %}{%- if not loop.first and messages[loop.index0 - 1].role"
        asks += " == 'assistant' %}{{- '" + end + "' }}{%- endif %}{{- '<|u|>' + m.content }}"
        template = FOR + asks + OTHERS.replace("{%- if", "{%- elif").replace("<|end|>", "<|stop|>")
        template += REPLY.replace("<|end|>", "") + END
        first = "tell 2" + (end or "<|u|>")
        for system in (None, "be 0"):
            turns = talk("ask 1", "tell 2", "ask 3", "tell 4", "ask 5", system=system)
            assert spoken(template, {"messages": turns})[1] == [first, first.replace("2", "4")]
        assert spoken(template, {"messages": TURNS})[1] == [first, "tell 4"]
        empty = spoken(template, {"messages": talk("a", "", "b", "tell")})[1]
        assert empty == [end or "<|u|>", "tell"]
        tokenizer = make_tokenizer(template, special=SPECIAL)
        assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == (end or "<|u|>")


def test_replies_are_found_where_a_template_asks_without_the_lines_before_a_header():
    """As vLLM's Alpaca template, whose turns have no tokens, and are parted if others follow."""
    parted = "{%- if not loop.last %}{{- '\n\n' }}{%- endif %}"
    header = "{{- '### ' + ('Say' if m.role == 'assistant' else 'Ask') + ':\n' + m.content }}"
    asks = END.replace("<|a|>", "### Say:\n")
    _, runs = spoken(FOR + header + parted + asks, {"messages": TURNS})
    assert [run.strip() for run in runs] == ["tell 2", "tell 4"]


def test_tools_that_a_template_leaves_out_without_a_system_message_are_refused():
    """As a template of FunctionGemma's does."""
    described = "{%- if m.role == 'system' %}{%- for t in tools %}{{- t | tojson }}{%- endfor %}"
    template = FOR + described + "{%- endif %}" + OTHERS + REPLY + END
    tools = [{"name": "weather", "parameters": {}}]
    text, _ = spoken(template, {"messages": TURNS, "tools": tools})
    assert '"name": "weather"' in text
    calling = template.replace(
        "m.content + '<|end|>' }}{%- endif", "(m.content or '') + calls(m) }}{%- endif"
    )
    for turns in (TURNS[1:], with_calls(city="a")[1:]):
        with pytest.raises(InputError, match="leaves out 'tools' .* give it a system message"):
            spoken(MACRO + calling, {"messages": turns, "tools": tools})


@pytest.mark.parametrize("end", ["<|end|>", "", "<|a|>"])
def test_words_that_a_template_writes_behind_the_results_of_their_calls_are_refused(end):
    """As Gemma 4's, which ends them, and DiffusionGemma's, which has another header there."""
    result = "{%- elif m.role == 'tool' %}"
    reply = "{%- else %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|a|>' }}" + (
        "{%- endif %}{{- calls(m) }}{%- if m.tool_calls %}{{- '<|tool|>' }}"
        "{%- if not loop.last %}{{- '(' + messages[loop.index0 + 1].content + ')' }}"
        "{%- if m.content %}{{- m.content + '" + end + "' }}{%- endif %}"
        "{%- else %}{{- m.content or '' }}{%- endif %}"
        "{%- else %}{{- m.content + '<|end|>' }}{%- endif %}{%- endif %}"
    )  # fmt: skip
    template = MACRO + FOR + OTHERS.replace("!= 'assistant'", "in ['user', 'system']") + result
    turns = with_calls(city="a")
    plain = ['<|call|>weather {"city": "a"}<|tool|>', "tell 2<|end|>", "tell 4<|end|>"]
    assert spoken(template + reply + END, {"messages": turns})[1] == plain
    turns[2]["content"] = "see here"
    with pytest.raises(InputError, match="message 3 .* cannot be told apart"):
        spoken(template + reply + END, {"messages": turns})


@pytest.mark.parametrize("generation", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_what_a_template_leaves_out_of_a_reply_is_refused(generation):
    """As gpt-oss's does with all calls but the first, and others with the only reasoning."""
    begin, end = generation
    call = "{%- if m.tool_calls %}{{- m.tool_calls[0].function | tojson }}{%- endif %}"
    reply = "{%- else %}" + begin + "{{- '<|a|>' + (m.content or '') }}" + call + (
        "{%- if loop.index > 3 and m.thinking %}{{- m.thinking }}{%- endif %}{{- '<|end|>' }}"
    ) + end + "{%- endif %}"  # fmt: skip
    template = FOR + OTHERS + reply + END
    twice = with_calls(city="Paris")
    twice[2]["tool_calls"] = [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in ("Paris", "Rome")
    ]
    with pytest.raises(InputError, match="leaves out message 3, or a part of it"):
        spoken(template, {"messages": twice})
    turns = [{**m, "thinking": "hm"} if m["content"] == "tell 4" else m for m in TURNS]
    assert "hm" in spoken(template, {"messages": turns})[1][1]
    with pytest.raises(InputError, match="leaves out message 2, or a part of it"):
        spoken(template, {"messages": turns[-2:]})


@pytest.mark.parametrize(
    ("template", "turns", "problem"),
    [
        (FOR + "{%- if m.role != 'system' %}" + OTHERS + REPLY + "{%- endif %}" + END, TURNS,
         "leaves out message 1"),
        (FOR + "{{- '<|u|>' ~ (m.content | upper) }}{%- endfor %}{{- messages | length }}", TURNS,
         "leaves out message 1|cannot be told apart"),
        (FOR + OTHERS + REPLY + "{%- endfor %}{{- '<|u|><|a|>' }}", TURNS, "cannot be told apart"),
        # It has a switch of that name.
        (FOR + OTHERS + REPLY + END + "{%- if thinking %}{%- endif %}",
         [*TURNS[:-1], {**TURNS[-1], "reasoning_content": "hm"}],
         "message 5: .* no place for 'reasoning_content'"),
        (FOR + OTHERS + "{%- elif m.content %}" + REPLY.replace("{%- else %}", "") + END,
         talk("a", "", "b", "tell"), "no place for the empty reply in message 2: drop it, or"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(template, turns, problem):
    with refused(f"^rows.jsonl:1: .*({problem})"):
        spoken(template, {"messages": turns})


def test_settings_of_the_template_come_from_the_row():
    template = FOR + OTHERS + REPLY + END + "{%- if loud %}{{- '!' }}{%- endif %}"
    row = {"messages": TURNS, "chat_template_kwargs": {"loud": True}}
    assert spoken(template, row)[0].endswith("!")
    for bad in ({"messages": []}, {"add_generation_prompt": True}, [1]):
        with pytest.raises(InputError, match="'chat_template_kwargs' must be an object without"):
            spoken(template, {**row, "chat_template_kwargs": bad})
    with pytest.raises(InputError, match="refuses the row: 'mood' .* row's tools or chat"):
        spoken("{{- mood + 'x' }}" + template, {"messages": TURNS})


@pytest.mark.parametrize("header", ["say:", "I say:\n"])
def test_headers_for_which_a_template_asks_with_other_white_space_are_not_learnt(header):
    """As files of templates that are written over several lines do."""
    reply = "{%- else %}{{- '   " + header + " ' + m.content + '<|end|>\n' }}{%- endif %}"
    asks = END.replace("'<|a|>'", "' " + header.replace(" ", "  ") + "'")
    turns = [*TURNS[:-1], {"role": "assistant", "content": header + " I say"}]
    _, (first, last) = spoken(FOR + OTHERS + reply + asks, {"messages": turns})
    assert first.lstrip() == "tell 2<|end|>"
    assert last.lstrip() == header + " I say<|end|>"
