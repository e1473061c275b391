"""`megatrain generate` and `chat`: print continuations of prompts as they are generated."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from megatrain.api import Engine
from megatrain.base.json_yaml import parse_json, read_text
from megatrain.base.seeds import derived_seed
from megatrain.base.units import GIB
from megatrain.config import ModelSection
from megatrain.data import ImageProcessor
from megatrain.data.prompts import Prompt
from megatrain.data.refused_fields import empty
from megatrain.errors import InputError, explained
from megatrain.generate import Sampling, generate
from megatrain.model.weights import resolve_model
from megatrain.placement import Precision
from megatrain.train.resolve import ResolvedModel

_UNREAD = ("system", "tools", "history", "chat_template_kwargs")  # fields that training reads


@contextmanager
def opened(
    model: str,
    device: str,
    precision: Precision,
    device_memory: str | None = None,
    host_memory: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Iterator[tuple[Any, Any, ImageProcessor]]:
    """The model of a run, checkpoint, folder or hub id, its tokenizer and processor of images.

    Raises InputError: one of them cannot be read, or the model writes no texts; DoesNotFit: host
    memory cannot hold the model.
    """
    resolved = ResolvedModel.of(ModelSection(path=model, trust_remote_code=trust_remote_code))
    resolve_model(str(resolved.section.path))  # first, for its message on a misspelt folder
    tokenizer = resolved.tokenizer
    with Engine(
        resolved.source,
        trust_remote_code=trust_remote_code,
        precision=precision,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
    ) as engine:
        _ = engine.generation_config  # raises for a model that writes no texts
        yield engine, tokenizer, resolved.images


def print_texts(
    engine: Any,
    tokenizer: Any,
    images: ImageProcessor,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int = 16,
    output: Path | None = None,
) -> None:
    """Print each prompt with its continuation; a single one while it is generated.

    Args: `output`: write prompts and completions to this file instead, as lines of JSON.

    Raises InputError: a prompt cannot be used.
    """
    if output is None and len(prompts) == 1:
        streamer = TextStreamer(
            tokenizer, skip_prompt=not isinstance(prompts[0], str), skip_special_tokens=True
        )
        generate(engine, tokenizer, prompts, sampling, streamer=streamer, images=images)
        return
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = generate(engine, tokenizer, batch, sampling, batch_size=batch_size, images=images)
        sampling = replace(sampling, seed=derived_seed(sampling.seed, start))  # of the next batch
        for prompt, text in zip(batch, texts, strict=True):
            if output is None:
                question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                print(f"--- {question}\n{text}\n", flush=True)
                continue
            key = "prompt" if isinstance(prompt, str) else "messages"
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({key: prompt, "completion": text}, ensure_ascii=False) + "\n")


def talk(
    engine: Any, tokenizer: Any, images: ImageProcessor, system: str | None, sampling: Sampling
) -> None:
    """Read lines and print replies until an empty line or the end of the input."""
    if not tokenizer.chat_template:
        raise InputError(f"{tokenizer.name_or_path}: has no chat template; take an instruct model")
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    shown: list[Any] = []
    print("an empty line ends the talk, /reset begins a new one, /image FILE shows a picture")
    with suppress(EOFError):
        while line := input("> ").strip():
            if line == "/reset":
                messages, shown = list(beginning), []
                continue
            if line.startswith("/image "):
                shown.append({"type": "image", "path": line.removeprefix("/image ").strip()})
                continue
            content: Any = [*shown, {"type": "text", "text": line}] if shown else line
            messages, shown = [*messages, {"role": "user", "content": content}], []
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            [reply] = generate(
                engine, tokenizer, [messages], sampling, streamer=streamer, images=images
            )
            messages.append({"role": "assistant", "content": reply})


def require_new(output: Path) -> None:
    """Raises InputError: the output file has content, from another command for example."""
    if output.is_file() and output.stat().st_size:
        raise InputError(f"{output}: holds something already; name a new file, or remove it")
    output.open("a").close()  # an unwritable file fails now, not after the texts are generated


def all_prompts(texts: Sequence[str], path: Path | None, *, chat: bool) -> list[Prompt]:
    """The prompts of options and of a file; with `chat`, a text is the message of a user."""
    prompts = [*texts, *([] if path is None else read_prompts(path))]
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT, or --prompts FILE")
    return [
        [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: its lines, or `prompt` or `messages` of rows of `.jsonl`."""
    lines = enumerate(read_text(path, GIB, regular=False).splitlines(), 1)
    numbered = [(number, line) for number, line in lines if line.strip()]
    if not numbered:
        raise InputError(f"{path}: holds no prompt; write one on each line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(line, f"{path}:{number}") for number, line in numbered]


def _prompt(line: str, where: str) -> Prompt:
    with explained(f"{where}: not JSON", "write one object on each line", of=ValueError):
        row = parse_json(line)
    row = row if isinstance(row, dict) else {}
    unread = [name for name in _UNREAD if not empty(row.get(name))]
    if unread:
        raise InputError(f"{where}: {unread[0]!r} is not read; only 'prompt' or 'messages' are")
    prompt = row.get("messages", row.get("prompt"))
    if not isinstance(prompt, str | list) or isinstance(row.get("messages"), str):
        raise InputError(f"{where}: neither 'prompt' (a text) nor 'messages' (a list)")
    return prompt
