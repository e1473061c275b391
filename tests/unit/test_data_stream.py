"""Rows of a stream: all of the data, in an order of the seed, and found again exactly."""

import json

import pytest
from data_cases import chat_tokenizer, make_tokenizer, same_batches, talk, write_jsonl

from megatrain.data import StreamLoader, open_stream
from megatrain.errors import InputError

NUM = 120


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", [{"text": f"Row {i}: calm."} for i in range(NUM)])


def opened(path, **options):
    options = {"sequence_length": 64, "block_tokens": 400, "seed": 1, **options}
    return open_stream(path, tokenizer=options.pop("tokenizer", make_tokenizer()), **options)


def loader(path, rows_per_step=3, workers=0, **options):
    stream = opened(path, **options)
    return StreamLoader(
        stream, rows_per_step=rows_per_step, rows_per_micro_batch=2, seed=1, workers=workers
    )


def documents(step):
    text = make_tokenizer().decode([i for b in step for i in b["input_ids"].flatten().tolist()])
    return [int(part.split(":")[0]) for part in text.split("Row ")[1:] if ":" in part]


def test_every_epoch_has_all_documents_in_an_order_of_the_seed(path):
    steps = loader(path, packing=False)
    taken = []
    while steps.epoch < 2:
        taken += documents(next(steps))
    steps.close()
    first, second = taken[:NUM], taken[NUM : 2 * NUM]
    assert sorted(first) == sorted(second) == list(range(NUM))
    assert first != second and first != sorted(first)
    assert max(first[:10]) < NUM / 2  # what is far in the data is far in the stream
    other = loader(path, packing=False, seed=2)
    assert documents(next(other)) != taken[:3]
    other.close()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_killed_goes_on_with_the_same_batches(path, packing, workers):
    options = {"packing": packing, "workers": workers}
    steps = loader(path, **options)
    states, taken = [steps.state_dict()], []
    for _ in range(50 if packing else 100):
        taken.append(next(steps))
        states.append(json.loads(json.dumps(steps.state_dict())))
    assert steps.epoch >= 2
    steps.close()
    for done in range(0, len(taken), 7):
        again = loader(path, **options)
        again.load_state_dict(states[done])
        assert all(same_batches(next(again), step) for step in taken[done : done + 3])
        assert again.state_dict() == states[min(done + 3, len(taken))] or done + 3 > len(taken)
        again.close()


def test_steps_across_blocks_and_conversations(tmp_path):
    rows = [{"messages": talk(f"ask {i}", f"tell {i} " * (1 + i % 7))} for i in range(40)]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    steps = loader(path, rows_per_step=11, tokenizer=chat_tokenizer("qwen"), sequence_length=256)
    first = next(steps)
    assert {batch["input_ids"].shape for batch in first} == {(2, 256), (1, 256)}
    assert "chat.jsonl:" in steps.describe()
    steps.close()


def test_what_a_row_of_the_data_is_made_of_stays_in_its_block(tmp_path):
    """A long document comes in pieces, of which a run that goes on could not tell one."""
    path = tmp_path / "long.txt"
    path.write_text("The sea was calm. " * 31_000)
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": "The sea. " * 60_000}, {"text": "calm"}])
    for each in (path, rows):
        stream = opened(each, block_tokens=1024)
        assert len(stream.block.documents) >= 2
        stream.close()


def test_bad_positions_and_changed_data_are_refused(path):
    steps = loader(path)
    for _ in range(9):
        next(steps)
    state = steps.state_dict()
    steps.close()
    fresh = loader(path)
    for damaged in (
        {},
        {"block": 3},
        {"block": ["a"]},
        {"block": [-5, 0, 0, 0, ""]},
        {"block": [10**6, 0, -1, -1, ""]},
    ):
        with pytest.raises(InputError, match="data position is damaged"):
            fresh.load_state_dict({k: v for k, v in state.items() if k != "block"} | damaged)
    path.write_text(path.read_text().replace("calm", "clam"))  # of the same size
    with pytest.raises(InputError, match="not that of the saved run"):
        fresh.load_state_dict(state)
    fresh.close()


def test_a_bad_row_ends_the_stream_where_it_is_needed_or_is_skipped(path, caplog):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:60], "{", *lines[60:]]))
    with pytest.raises(InputError, match="a.jsonl:61: not JSON"):
        loader(path)  # rows are tokenised many at a time
    steps = loader(path, bad_rows="skip")
    for _ in range(50):
        next(steps)
    assert "left out 1 bad rows so far" in caplog.text
    steps.close()
    path.write_text('{"text": ""}\n')
    with pytest.raises(InputError):
        loader(path)


def test_a_stream_of_the_hub_is_read_like_its_rows(path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    hub = datasets.IterableDataset.from_generator(lambda: iter(rows))
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.update(k) or hub)
    here, there = loader(path), loader("someone/something")
    assert asked["streaming"] is True
    for _ in range(30):
        assert same_batches(next(here), next(there))
    here.close()
    there.close()
