"""Rows hold every token once, and nothing is predicted from another document."""

import hashlib
import logging
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatrain.data import open_dataset, readers
from megatrain.data.encoders import Document, Encoder
from megatrain.data.images import Medium
from megatrain.data.row_packing import Segments, fill_rows, fit_rows, shuffled, split_rows
from megatrain.data.token_store import open_store
from megatrain.errors import InputError, RunFailed
from megatrain.train.second_model import References
from tests.inside import sized
from tests.unit.data_cases import TEXT, chat_tokenizer, make_tokenizer, talk, write_jsonl

WORDS = TEXT.split()
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def documents(count=40):
    """Texts of 1 to 45 words, all different."""
    return [
        " ".join([f"{i}", *(WORDS * 2)[i % 7 : i % 7 + 1 + (i * i) % 45]]) for i in range(count)
    ]


def open_text(tmp_path, texts, tokenizer=None, name="data.jsonl", **options):
    path = write_jsonl(tmp_path / name, [{"text": t} for t in texts])
    options = {"sequence_length": 32, "cache_dir": tmp_path / "cache", **options}
    return open_dataset(path, kind="text", tokenizer=tokenizer or make_tokenizer(), **options)


def segments_of(batch):
    """(ids, labels) of each segment of a packed batch, by the positions that restart."""
    positions = batch.get("position_ids")
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        starts = [0]
        if positions is not None:
            starts = torch.nonzero(positions[row] == 0).flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if positions is not None:
                assert positions[row, begin:end].tolist() == list(range(end - begin))
            yield ids[begin:end].tolist(), labels[begin:end].tolist()


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 16), st.sampled_from([fill_rows, split_rows, fit_rows]))
@example([17, 16, 33], 16, split_rows)
@example([17, 16, 33], 16, fill_rows)
def test_every_token_is_in_one_row_and_no_row_is_too_long(lengths, row_length, arrange):
    if arrange is fit_rows:
        lengths = [min(n, row_length) for n in lengths]
    number = np.arange(len(lengths))
    rows = arrange(Segments(number, np.zeros_like(number), np.array(lengths)), row_length)
    seen = [np.zeros(n, int) for n in lengths]
    sizes = []
    for first, last in zip(rows.first[:-1], rows.first[1:], strict=True):
        row = rows.segments[slice(first, last)]
        for document, begin, end in zip(row.document, row.begin, row.end, strict=True):
            assert begin < end
            seen[document][begin:end] += 1
        sizes.append(int(row.lengths.sum()))
    assert all((counts == 1).all() for counts in seen)
    assert max(sizes) <= row_length
    if arrange is fill_rows:
        assert all(size == row_length for size in sizes[:-1])
    if arrange is fit_rows:
        assert len(rows.segments) == len(lengths)  # whole
        # Two rows that would fit in one are a fault of the fitting.
        assert len(sizes) < 2 or sum(sorted(sizes)[:2]) > row_length
    if arrange is split_rows:
        assert len(rows.segments) == len(rows)


def test_the_order_never_changes_between_versions():
    assert shuffled(10, 1, 0, 0).tolist() == [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]


@pytest.mark.parametrize("bos_first", [False, True])
def test_packed_text_is_every_document_with_its_end_and_no_leak(tmp_path, bos_first):
    tokenizer = make_tokenizer(bos_first=bos_first)
    texts = documents()
    data = open_text(tmp_path, texts, tokenizer)
    expected = [[*tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts]
    assert (expected[0][0] == tokenizer.bos_token_id) == bos_first
    stream = []
    for number, (ids, labels) in enumerate(s for b in data.batches(3) for s in segments_of(b)):
        assert labels[0] == -100, number
        if len(ids) == 1 or labels[1] != -100:  # the others are padding
            assert labels[1:] == ids[1:]
            stream += ids
    ends = [i + 1 for i, token in enumerate(stream) if token == tokenizer.eos_token_id]
    found = [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert sorted(found) == sorted(expected) and found != expected  # all, and shuffled
    assert data.num_tokens == sum(map(len, expected))
    assert all("attention_mask" not in batch for batch in data.batches(3))


def test_unpacked_rows_are_padded_to_the_longest_in_steps_of_eight(tmp_path):
    tokenizer = make_tokenizer()
    data = open_text(tmp_path, documents(), tokenizer, packing=False, sequence_length=52)
    widths = set()
    for batch in data.batches(4):
        lengths = [int((row != -100).sum()) + 1 for row in batch["labels"]]
        width = batch["input_ids"].shape[1]
        widths.add(width)
        assert width == min(-(-max(lengths) // 8) * 8, 52)
        assert "position_ids" not in batch
        mask = batch.get("attention_mask", torch.ones_like(batch["labels"]))
        assert mask.sum(1).tolist() == lengths
        for row, length in enumerate(lengths):
            assert mask[row, :length].all() and batch["labels"][row, 0] == -100
            assert (batch["labels"][row, 1:length] == batch["input_ids"][row, 1:length]).all()
            assert (batch["input_ids"][row, length:] == tokenizer.pad_token_id).all()
    assert len(widths) > 2 and 52 in widths
    full = open_text(tmp_path, [TEXT * 4], packing=False, sequence_length=40)
    assert "attention_mask" not in full.batch([0])


def test_long_documents_come_in_pieces_with_one_end(tmp_path, monkeypatch):
    sized(monkeypatch, readers, PIECE_BYTES=100)
    tokenizer = make_tokenizer(bos_first=True)
    (tmp_path / "long.txt").write_text(TEXT * 3)
    for path in (tmp_path / "long.txt", write_jsonl(tmp_path / "long.jsonl", [{"text": TEXT * 3}])):
        data = open_dataset(path, kind="text", tokenizer=tokenizer, sequence_length=64,
                            cache_dir=tmp_path / "cache")  # fmt: skip
        ids = np.concatenate([b["input_ids"].flatten() for b in data.batches(8)])
        assert (ids == tokenizer.eos_token_id).sum() == (ids == tokenizer.bos_token_id).sum() == 1
        kept = [i for i in ids.tolist() if i > 2]
        assert len(tokenizer.decode(kept)) == len(TEXT * 3)
        assert any("from token" in data.describe(r) for r in range(len(data)))


def test_empty_documents_are_dropped_with_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data = open_text(tmp_path, ["", "The sea", ""])
    (record,) = caplog.records
    assert "dropped 2 of 3 documents, which have no text (first: " in record.getMessage()
    open_text(tmp_path, ["The sea"], overlong="drop")
    assert "overlong: drop is not for texts, which are cut" in caplog.text
    assert data.num_tokens == len(make_tokenizer()("The sea")["input_ids"]) + 1
    with pytest.raises(InputError, match="none of the 2 rows has text"):
        open_text(tmp_path, ["", ""])


def test_the_fingerprint_follows_content_and_settings_not_paths_or_times(tmp_path):
    texts = documents()
    base = open_text(tmp_path, texts).fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = open_text(tmp_path / "elsewhere", texts, name="other.jsonl")
    assert moved.fingerprint == base
    os.utime(tmp_path / "data.jsonl", (1, 1))
    assert open_text(tmp_path, texts).fingerprint == base
    others = [
        open_text(tmp_path, [*texts[:-1], texts[-1] + "!"]),
        open_text(tmp_path, texts, seed=1),
        open_text(tmp_path, texts, sequence_length=33),
        open_text(tmp_path, texts, packing=False),
        open_text(tmp_path, texts, make_tokenizer(bos_first=True)),
        *open_text(tmp_path, texts).hold_out(0.2),
        *open_text(tmp_path, texts).hold_out(0.3),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == len(others) + 1


def test_tokens_are_made_once_and_again_when_damaged_or_changed(tmp_path, monkeypatch, caplog):
    made = []
    original = Encoder.documents
    monkeypatch.setattr(Encoder, "documents", lambda *a: made.append(1) or original(*a))
    first = open_text(tmp_path, documents())

    def again(**options):
        options = {"sequence_length": 32, "tokenizer": make_tokenizer(), **options}
        return open_dataset(
            tmp_path / "data.jsonl", kind="text", cache_dir=tmp_path / "cache", **options
        )

    assert again().fingerprint == first.fingerprint
    assert again(sequence_length=64, seed=3).num_tokens == first.num_tokens
    assert len(made) == 1
    (store,) = (tmp_path / "cache").glob("tokens-*/")
    for count, damaged in enumerate(("tokens.bin", "documents.bin", "meta.json"), start=2):
        os.truncate(store / damaged, 40)
        with caplog.at_level(logging.WARNING):
            assert again().fingerprint == first.fingerprint
        assert caplog.text.count("damaged") == count - 1 and len(made) == count
        if damaged == "meta.json":
            (store / damaged).unlink()
            os.mkfifo(store / damaged)  # would be waited for
            assert again().fingerprint == first.fingerprint
            (store / damaged).write_text("[" * 100_000)
            assert again().fingerprint == first.fingerprint
            del made[-2:]
    os.utime(tmp_path / "data.jsonl", ns=(0, 10**18))  # so its content may have changed
    assert again().fingerprint == first.fingerprint and len(made) == 5
    other = again(tokenizer=make_tokenizer(bos_first=True))
    assert other.num_tokens > first.num_tokens and len(made) == 6


def test_each_flipped_bit_of_kept_tokens_is_found_before_it_is_trained_on(tmp_path):
    ids, folder, data = np.arange(400, dtype=np.int32), tmp_path / "tokens", b"pixels"
    image = Medium("", hashlib.blake2b(data, digest_size=16).hexdigest(), (2, 3), (), data)
    rows = [Document(ids + n, ids > 0, images=[image] * (n % 2), line=n) for n in range(30)]

    def opened():
        return open_store(folder, ["a"], lambda: rows, {})

    def everything(store):
        tokens = [[part.tolist() for part in store.read(n, 0, 40)] for n in range(30)]
        return tokens, [store.images_of(n) for n in range(30)], store.digest

    wanted, random = everything(opened()), np.random.default_rng(0)
    for name in ("tokens.bin", "documents.bin", "images.bin", "meta.json"):
        path, good = folder / name, (folder / name).read_bytes()
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        for _ in range(5):
            before, bad = opened(), bytearray(good)
            bad[random.integers(len(good))] ^= 1 << random.integers(8)
            path.write_bytes(bad)
            os.utime(path, ns=times)
            for again in (False, True):  # while it is open, and when it is opened again
                try:
                    assert everything(opened() if again else before) == wanted
                    assert name == "meta.json" or not again or path.read_bytes() == good
                except RunFailed as error:
                    assert name == "tokens.bin" or not again  # all else is repaired at once
                    damaged = rf"{name}: block \d .* at byte .* delete {folder}"
                    assert re.search(damaged, str(error))
            path.write_bytes(good)
            os.utime(path, ns=times)
    (folder / "images.bin").unlink()
    assert everything(opened()) == wanted


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_held_out_part_is_disjoint_fixed_and_of_the_asked_size(tmp_path, kind):
    if kind == "text":
        rows = [{"text": t} for t in documents(200)]
    else:
        rows = [{"messages": talk(f"What is {i}?", f"It is {i}.")} for i in range(200)]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    data = open_dataset(path, kind=kind, tokenizer=chat_tokenizer("qwen"), sequence_length=64,
                        cache_dir=tmp_path)  # fmt: skip
    train, held_out = data.hold_out(0.1)
    assert train.num_tokens + held_out.num_tokens == data.num_tokens
    assert held_out.num_tokens / data.num_tokens == pytest.approx(0.1, abs=0.02)
    again = data.hold_out(0.1)[1]
    assert again.fingerprint == held_out.fingerprint
    assert [torch.equal(a["input_ids"], b["input_ids"]) for a, b in
            zip(again.batches(2), held_out.batches(2), strict=True)]  # fmt: skip
    places = [{part.describe(row) for row in range(len(part))} for part in (train, held_out)]
    if kind == "chat":
        lines = [{p for row in part for p in row.split(", ")} for part in places]
        assert not lines[0] & lines[1] and len(lines[0] | lines[1]) == 200


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_sources_with_weights_have_their_shares_of_the_tokens(tmp_path, packing, repeat):
    for name, count in {"a": 300, "b": 60, "c": 20}.items():
        rows = [{"text": f"{name}{i} " + "The sea was calm. " * (i % 4)} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]

    def opened(**options):
        return open_dataset(paths, tokenizer=make_tokenizer(), sequence_length=64, packing=packing,
                            cache_dir=tmp_path / "cache", **options)  # fmt: skip

    data, plain = opened(weights=[1, 3, 0.5], repeat=repeat), opened()
    sources = data.store.documents()["source"][data.documents.document]
    tokens = np.bincount(sources, data.documents.lengths)
    np.testing.assert_allclose(tokens / tokens.sum(), np.array([1, 3, 0.5]) / 4.5, atol=0.02)
    times = np.bincount(data.documents.document, minlength=380)
    if repeat:
        assert times[:300].tolist() == [1] * 300 and times[300:].min() >= 1
    else:
        assert times.max() == 1
    assert (np.diff(sources) != 0).sum() > 10  # they are shuffled, not one after another
    assert opened(weights=[1, 3, 0.5], repeat=repeat).fingerprint == data.fingerprint
    others = [plain, opened(weights=[1, 3, 1], repeat=repeat), opened(weights=[1, 3, 0.5], seed=1)]
    assert data.fingerprint not in [other.fingerprint for other in others]
    assert sorted(opened(weights=[2, 2, 2], repeat=True).documents.document)[:300] == [*range(300)]


def test_who_waits_for_the_tokens_of_another_run_is_told(tmp_path, caplog):
    caplog.set_level("INFO", "megatrain.data")
    document = Document(np.arange(4, dtype=np.int32), np.ones(4, bool))
    with ThreadPoolExecutor(1) as pool:
        with FileLock(tmp_path / "tokens.lock"):
            waiting = pool.submit(
                open_store, tmp_path / "tokens", ["a.txt"], lambda: [document], {}
            )
            end = time.monotonic() + 120
            while "another run is making these tokens" not in caplog.text:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert waiting.result().read(0, 0, 4)[0].tolist() == [0, 1, 2, 3]


def test_each_flipped_bit_of_a_references_log_probabilities_is_found(tmp_path):
    wanted, chance = References({"train": torch.randn(3, 2)}, {"train": "key"}), random.Random(0)
    wanted.write(tmp_path)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    for _ in range(200):
        bad = bytearray(good)
        bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        try:  # numbers may be written in two ways; without its checksum's name a file has no sums
            read = References.read(tmp_path)
            if read.sums:
                assert read.keys == wanted.keys
                assert torch.equal(read.sums["train"], wanted.sums["train"])
        except InputError as error:
            assert "\n" not in str(error)
