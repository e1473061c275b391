"""Small tokenizers and chat templates shaped like those of well-known models."""

import json
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatrain.data.conversation import Conversation
from megatrain.data.encoders import Encoder
from megatrain.data.images import ImageProcessor
from megatrain.data.rows import Reading
from tests.refusals import table

TEXT = """Tell me a short story about the sea. The sea was calm, and nobody was afraid of it.
What is 12 + 30? It is 42. Thanks! You are welcome: ask again whenever you like.
You are a helpful assistant. The weather in Paris is 21 degrees, sunny; naïve café.
def add(a, b):
    return a + b
"""


TEMPLATES, ROWS = (table(__file__, name) for name in ("templates.yaml", "rows.yaml"))


def one_line(template: str) -> str:
    """A template of the table, whose lines are one."""
    return "".join(map(str.strip, template.splitlines()))


QWEN = one_line(TEMPLATES["chats"]["qwen"]["template"])


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
    return shaped_tokenizer(**TEMPLATES["chats"][name])


def shaped_tokenizer(template: str, **shape: Any) -> PreTrainedTokenizerFast:
    """`make_tokenizer` of a row of the table."""
    if "special" in shape:
        shape["special"] = tuple(shape["special"])
    return make_tokenizer(one_line(template), **shape)


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
    found = Encoder(tokenizer, None, ImageProcessor(None)).conversation(example, where)
    return found.ids, found.targets


def spoken(tokenizer: Any, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The whole text of a row, and the runs of it that are learnt."""
    ids, targets = encode_row(tokenizer, row)
    runs = groupby(zip(ids.tolist(), targets.tolist(), strict=True), key=lambda t: t[1])
    return tokenizer.decode(ids), [tokenizer.decode([i for i, _ in r]) for on, r in runs if on]
