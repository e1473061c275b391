"""Small tokenizers and chat templates shaped like those of well-known models."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatrain.data.conversation import Conversation
from megatrain.data.encoders import Encoder
from megatrain.data.examples import PlacedExample
from megatrain.data.rows import Reading
from megatrain.errors import InputError

TEXT = """Tell me a short story about the sea. The sea was calm, and nobody was afraid of it.
What is 12 + 30? It is 42. Thanks! You are welcome: ask again whenever you like.
You are a helpful assistant. The weather in Paris is 21 degrees, sunny; naïve café.
def add(a, b):
    return a + b
"""

# Qwen2.5: a default system prompt, tools in the system turn, tool results as a user turn.
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.' }}{%- endif %}"
    "{%- if tools %}{{- '\\n\\n# Tools\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first)"
    " or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    "{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

# Mistral: no header before a reply, and turns must alternate.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Qwen3: the last reply gets a thinking block, which vanishes once another turn follows.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def _trained(metaspace: bool, special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({*map(chr, range(33, 127)), *TEXT, "▁"} - {" "})
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    template: str | None = None,
    *,
    special: tuple[str, ...] = ("<s>", "</s>", "<pad>"),
    eos: str | None = "</s>",
    metaspace: bool = False,
    bos_first: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most 600 tokens; `bos_first` puts `<s>` before every text, as Llama's."""
    backend = Tokenizer.from_str(_trained(metaspace, special))
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    if bos_first:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=eos, pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one of the named chat formats."""
    if name == "llama3":
        special = ("<s>", "<|eot_id|>", "<pad>", "<|start_header_id|>", "<|end_header_id|>")
        return make_tokenizer(LLAMA3, special=special, eos="<|eot_id|>")
    if name == "mistral":
        return make_tokenizer(MISTRAL, special=("<s>", "</s>", "<pad>"), metaspace=True)
    if name == "gemma":
        special = ("<s>", "</s>", "<pad>", "<start_of_turn>", "<end_of_turn>")
        return make_tokenizer(GEMMA, special=special, metaspace=True)
    template = {"qwen": QWEN, "marked": MARKED, "thinking": THINKING}[name]
    special = ("<s>", "<|im_end|>", "<pad>", "<|im_start|>")
    return make_tokenizer(template, special=special, eos="<|im_end|>")


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant by turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode_row(tokenizer: Any, row: dict[str, Any], where: str = "rows.jsonl:1") -> tuple[Any, Any]:
    """The ids of a row of any conversational format, and which of them are learnt."""
    reading = Reading("auto", {})
    example, _ = reading.example(reading.find(row, where), row, where)
    assert isinstance(example, Conversation)
    found = Encoder(tokenizer, None).conversation(PlacedExample(0, 1, where, example))
    return found.ids, found.targets


def spoken(tokenizer: Any, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The whole text of a row, and the runs of it that are learnt."""
    ids, targets = encode_row(tokenizer, row)
    runs = groupby(zip(ids.tolist(), targets.tolist(), strict=True), key=lambda t: t[1])
    return tokenizer.decode(ids), [tokenizer.decode([i for i, _ in r]) for on, r in runs if on]


@contextmanager
def refused(problem: str) -> Iterator[Any]:
    """The block ends in an InputError of one line that matches `problem`."""
    with pytest.raises(InputError, match=problem) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def same_batches(first, second):
    """Whether two lists of named tensors are the same bit for bit."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(first, second, strict=True)
    )
