"""Everything that reads files of others, each with a valid file and hostile variants of it."""

import contextlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig

from megatrain.api import Engine
from megatrain.checkpoint import open_checkpoint
from megatrain.checkpoint.manifest import signed
from megatrain.config import load
from megatrain.config.load import validate
from megatrain.data import load_tokenizer, open_dataset, train_bpe_tokenizer
from megatrain.data.encoders import Encoder, Examples
from megatrain.data.images import ImageProcessor
from megatrain.data.rows import Reading
from megatrain.data.sources import find_files
from megatrain.errors import MegatrainError
from megatrain.model.build import empty_model, load_config
from megatrain.model.safetensors_io import stored_tensors
from megatrain.optim import AdamW
from megatrain.train.resume import RunState, check_config, cut_metrics
from megatrain.train.steps import BadSteps
from tests.cli.cases import SENTENCES, tiny_llama, write_run_file
from tests.reliability.mutations import changed, spoilt
from tests.unit.data_cases import write_jsonl

MORE_BYTES = 3 << 30
SECONDS = 20


@dataclass(frozen=True)
class Reader:
    """`read` gets the bytes of one file; only errors of our own may come out of it."""

    valid: bytes
    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes], object]


def feed(reader: Reader, data: bytes) -> bool:
    """Whether it took the input; an error that is not ours, or none in time, comes out."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.read(data)
    except MegatrainError as error:
        assert "\n" not in str(error).strip() or len(str(error)) < 3000
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def fuzz(reader: Reader, count: int) -> None:
    """Feed `count` inputs."""

    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(reader.inputs)
    def each(data: bytes) -> None:
        feed(reader, data)

    each()


def variants(valid: bytes, tree: Any = None) -> st.SearchStrategy[bytes]:
    """Of a valid file, and of what it holds if that is JSON."""
    return spoilt(valid) if tree is None else spoilt(valid) | changed(tree)


def readers(folder: Path) -> dict[str, Reader]:
    """All of them, with what they need made in `folder`."""
    tokenizer = folder / "tokenizer"
    (folder / "corpus.txt").write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([folder / "corpus.txt"], 300, tokenizer)
    run_file = write_run_file(folder, tokenizer)
    return {
        "run file": _run_file(folder, run_file),
        "manifest": _manifest(folder),
        "run state": _run_state(folder, run_file),
        "shard": _shard(folder),
        "index": _index(folder),
        "text": _rows(folder, tokenizer, "text"),
        "chat": _rows(folder, tokenizer, "chat"),
        "json": _files(folder, tokenizer, "rows.json"),
        "csv": _files(folder, tokenizer, "rows.csv"),
        "config.json": _model_config(folder),
        "tokenizer.json": _tokenizer(folder, tokenizer),
        "metrics": _metrics(folder),
    }


def _of_file(path: Path, inputs: Any, read: Callable[[], object]) -> Reader:
    """What reads the file at `path`, which is valid; inputs are variants of a tree unless given."""
    valid = path.read_bytes()

    def each(data: bytes) -> None:
        path.write_bytes(data)
        read()

    given = isinstance(inputs, st.SearchStrategy)
    return Reader(valid, inputs if given else variants(valid, inputs), each)


def _run_file(folder: Path, valid: Path) -> Reader:
    path = Path(shutil.copy(valid, folder / "fuzzed.yaml"))

    def read() -> None:
        text = path.read_bytes()[:200].decode(errors="replace")
        with contextlib.suppress(MegatrainError):
            load(valid, [text])
            load(valid, ["data.path=" + text])
        load(path)

    return _of_file(path, load(valid).model_dump(mode="json"), read)


def _manifest(folder: Path) -> Reader:
    config = AutoConfig.for_model(**tiny_llama(vocab_size=64, num_hidden_layers=1))
    saved = folder / "checkpoint"
    with Engine(config, optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        engine.save(saved, extra={"step": 1})
    valid = (saved / "manifest.json").read_bytes()
    inputs = variants(valid) | changed(json.loads(valid)).map(_signed)
    return _of_file(saved / "manifest.json", inputs, lambda: open_checkpoint(saved))


def _signed(data: bytes) -> bytes:
    """Its checksum made right, so that what it says is looked at."""
    try:
        return json.dumps(signed(json.loads(data))).encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        return data


def _run_state(folder: Path, run_file: Path) -> Reader:
    config = load(run_file)
    state = {
        "step": 3,
        "data": {"steps": 3, "rows": 12, "seed": 0, "shuffle": True, "fingerprint": "x"},
        "refusals": {"norms": [1.0, 2.0], "skipped": 0},
        "config": config.model_dump(mode="json"),
    }

    def read(data: bytes) -> None:
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            return  # the checkpoint's own reader has refused it
        if isinstance(tree, dict):
            found = RunState.of(tree, folder)
            check_config(config, found.config, folder)
            BadSteps(config.training).load_state_dict(found.refusals)
            validate(found.config, "saved")

    return Reader(json.dumps(state).encode(), changed(state), read)


def _shard(folder: Path) -> Reader:
    shards = folder / "shards"
    shards.mkdir()
    path = shards / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    valid = path.read_bytes()
    length = int.from_bytes(valid[:8], "little")
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]

    def shard(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + data

    inputs = spoilt(valid) | changed(header).map(shard)
    return _of_file(path, inputs, lambda: [s.read() for s in stored_tensors(shards).values()])


def _index(folder: Path) -> Reader:
    shards = folder / "indexed"
    shards.mkdir()
    save_file({"a": torch.ones(2, 3)}, shards / "one.safetensors")
    save_file({"b": torch.ones(2, 3)}, shards / "two.safetensors")
    os.symlink("/etc/passwd", shards / "x")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}, "metadata": {}}
    path = shards / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return _of_file(path, index, lambda: stored_tensors(shards))


def _rows(folder: Path, tokenizer: Path, kind: Any) -> Reader:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}]
    row = {"text": "the cat sat"} if kind == "text" else {"messages": talk, "tools": None}
    valid = (json.dumps(row) + "\n").encode()
    inputs = spoilt(valid * 2) | changed(row).map(lambda line: line + b"\n" + valid)
    read = _reading(folder / f"{kind}.jsonl", tokenizer, template, sequence_length=32, kind=kind)
    return Reader(valid, inputs, read)


def _files(folder: Path, tokenizer: Path, name: str) -> Reader:
    """Files of other kinds and formats, through a template that rewrites earlier turns."""
    template = (
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ '=' if loop.last }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}|\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = '{"name": "a", "arguments": {"b": "c"}}'
    said = [("human", "hi"), ("function_call", call), ("observation", "a dog"), ("gpt", "the cat")]
    said += [("human", "a dog"), ("gpt", "the mat")]
    row: dict[str, Any] = {"conversations": [{"from": who, "value": text} for who, text in said]}
    row |= {"system": "the", "tools": '[{"name": "a"}]', "id": 1}
    valid = json.dumps([row, row]).encode()
    read = _reading(folder / name, tokenizer, template, sequence_length=256)
    if name.endswith(".csv"):
        valid = b'question,answer,id\nthe cat,"a ""dog"", ran",1\nthe mat,sat,2\n'
    return Reader(valid, variants(valid, None if name.endswith(".csv") else [row]), read)


def _reading(path: Path, folder: Path, template: str, **how: Any) -> Callable[[bytes], None]:
    """Reads data sets of a file, with a tokenizer that has this template."""
    tokenizer, cache = load_tokenizer(folder), path.with_name(f"{path.name}-cache")
    tokenizer.chat_template = template

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            rows = open_dataset(path, tokenizer=tokenizer, cache_dir=cache, vocab_size=300, **how)
            rows.batch(range(len(rows)))
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    return read


def _model_config(folder: Path) -> Reader:
    model = folder / "model-config"
    AutoConfig.for_model(**tiny_llama(vocab_size=64)).save_pretrained(model)
    path = model / "config.json"
    tree = json.loads(path.read_text())
    return _of_file(path, tree, lambda: empty_model(load_config(model)))


def _tokenizer(folder: Path, whole: Path) -> Reader:
    copy = shutil.copytree(whole, folder / "tokenizer-copy")
    path, text = copy / "tokenizer.json", folder / "corpus.txt"
    tree = json.loads(path.read_text())
    tree["model"] |= {"vocab": {"t": 0, "h": 1, "<|endoftext|>": 2}, "merges": []}
    path.write_text(json.dumps(tree))

    def read() -> None:
        examples = Examples(find_files(text, "text"), Reading("text", {}), "stop")
        list(Encoder(load_tokenizer(copy), None, ImageProcessor(None)).documents(examples))

    return _of_file(path, tree, read)


def _metrics(folder: Path) -> Reader:
    path = folder / "metrics.jsonl"
    lines = ({"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}, {"step": 2, "eval_loss": 2.0})
    write_jsonl(path, [*lines])
    return _of_file(path, [lines[0]], lambda: cut_metrics(path, 1))


def limit_memory() -> None:
    """Allow little more memory than there is now; an input that takes too long ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
