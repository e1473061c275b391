"""The order of steps, of stored rows and of streams, is found again exactly."""

import json
import threading

import pytest

from megatrain.data import StepLoader, StreamLoader, open_dataset, open_stream
from megatrain.errors import InputError
from tests.unit.data_cases import make_tokenizer, refused, same_batches, write_jsonl

ROWS = 23


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same documents packed (rows of equal length) and not."""
    folder = tmp_path_factory.mktemp("loader")
    texts = [{"text": f"Row {i}. " + "The sea was calm. " * (1 + i % 5)} for i in range(ROWS)]
    path = write_jsonl(folder / "data.jsonl", texts)
    return {
        packing: open_dataset(path, kind="text", tokenizer=make_tokenizer(), sequence_length=64,
                              cache_dir=folder, packing=packing)
        for packing in (True, False)
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(datasets):
    assert len(datasets[False]) == ROWS
    return datasets[False]


def loader(data, **options):
    options = {"rows_per_step": 5, "rows_per_micro_batch": 2, "seed": 1, **options}
    return StepLoader(data, **options)


def rows_of(step):
    """Every row of a step as its learnt tokens, which differ from row to row."""
    return [
        tuple(ids[labels != -100].tolist())
        for batch in step
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def take(loader, steps):
    return [rows_of(next(loader)) for _ in range(steps)]


def test_every_epoch_has_every_row_once_in_another_order(data):
    steps = loader(data, rows_per_step=1)
    rows = [row for step in take(steps, 15 * ROWS) for row in step]
    epochs = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    assert len(epochs[0]) == len(set(epochs[0])) == ROWS
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert steps.epoch == 15
    assert loader(data, rows_per_step=5).steps_of(1) == 5
    assert loader(data, rows_per_step=ROWS * 6).steps_of(3) == 1
    assert loader(data, rows_per_step=ROWS - 1).steps_of(2) == 3


def test_the_seed_decides_the_order_and_nothing_else_does(data):
    expected = take(loader(data), 12)
    assert take(loader(data), 12) == expected
    assert take(loader(data, seed=2), 12) != expected
    for workers in (1, 3):
        ahead = loader(data, workers=workers)
        assert take(ahead, 12) == expected
        ahead.close()
    for size in (1, 5, 100):
        assert take(loader(data, rows_per_micro_batch=size), 12) == expected


def test_a_step_is_cut_into_micro_batches_of_rows_of_like_length(datasets):
    step = next(loader(datasets[False], rows_per_step=9, rows_per_micro_batch=4))
    assert [len(batch["input_ids"]) for batch in step] == [4, 4, 1]
    widths = [batch["input_ids"].shape[1] for batch in step]
    assert widths == sorted(widths, reverse=True)
    one, other = (
        loader(datasets[True], rows_per_step=8, rows_per_micro_batch=size) for size in (1, 3)
    )
    assert take(one, 2) == take(other, 2)  # packed rows keep their order


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_a_resumed_loader_goes_on_exactly(data, done, workers):
    whole = loader(data)
    expected = [next(whole) for _ in range(done + 6)]
    first = loader(data, workers=workers)
    for _ in range(done):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = loader(data, workers=workers)
    next(second)  # what it did before does not matter, nor what it prepared ahead
    second.load_state_dict(state)
    for step in expected[done:]:
        assert same_batches(next(second), step)
    assert second.epoch == whole.epoch
    second.close()


def test_a_resume_may_change_rows_per_step(data):
    rows = [row for step in take(loader(data, rows_per_step=1), 40) for row in step]
    first = loader(data, rows_per_step=4)
    take(first, 3)
    second = loader(data, rows_per_step=7)
    second.load_state_dict(first.state_dict())
    (found,) = take(second, 1)
    assert sorted(found) == sorted(rows[12:19])
    third = loader(data, rows_per_step=2)
    third.load_state_dict(second.state_dict())
    assert sorted(take(third, 1)[0]) == sorted(rows[19:21])
    assert third.state_dict()["steps"] == 5 and third.state_dict()["rows"] == 21


def test_other_data_settings_or_seed_are_refused_on_resume(datasets, tmp_path):
    state = loader(datasets[False]).state_dict()
    with pytest.raises(InputError, match=f"fingerprint '{state['fingerprint']}', now"):
        loader(datasets[True]).load_state_dict(state)
    with pytest.raises(InputError, match="with seed 1, this one with 2"):
        loader(datasets[False], seed=2).load_state_dict(state)
    for name, value in {"fingerprint": "\n", "steps": True, "rows": -1, "seed": 2**53}.items():
        steps = loader(datasets[False])
        good = steps.state_dict()
        with refused(rf"{name}|fingerprint"):
            steps.load_state_dict({**good, name: value})
        assert steps.state_dict() == good


def test_threads_end_with_close(data):
    before = threading.active_count()
    steps = loader(data, workers=3)
    next(steps)
    assert threading.active_count() > before
    steps.close()
    steps.close()
    assert threading.active_count() == before
    assert rows_of(next(steps)) == take(loader(data), 2)[1]


# Rows of a stream: all of the data, in an order of the seed, and found again exactly.

NUM = 120


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", [{"text": f"Row {i}: calm."} for i in range(NUM)])


def opened(path, **options):
    options = {"sequence_length": 64, "block_tokens": 400, "seed": 1, **options}
    return open_stream(path, tokenizer=options.pop("tokenizer", make_tokenizer()), **options)


def stream_loader(path, rows_per_step=3, workers=0, **options):
    stream = opened(path, **options)
    return StreamLoader(
        stream, rows_per_step=rows_per_step, rows_per_micro_batch=2, seed=1, workers=workers
    )


def documents(step):
    text = make_tokenizer().decode([i for b in step for i in b["input_ids"].flatten().tolist()])
    return [int(part.split(":")[0]) for part in text.split("Row ")[1:] if ":" in part]


def test_every_epoch_has_all_documents_in_an_order_of_the_seed(path):
    steps = stream_loader(path, packing=False)
    taken = []
    while steps.epoch < 2:
        taken += documents(next(steps))
    steps.close()
    first, second = taken[:NUM], taken[NUM : 2 * NUM]
    assert sorted(first) == sorted(second) == list(range(NUM))
    assert first != second and first != sorted(first)
    assert max(first[:10]) < NUM / 2  # what is far in the data is far in the stream
    other = stream_loader(path, packing=False, seed=2)
    assert documents(next(other)) != taken[:3]
    other.close()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_killed_goes_on_with_the_same_batches(path, packing, workers):
    options = {"packing": packing, "workers": workers}
    steps = stream_loader(path, **options)
    states, taken = [steps.state_dict()], []
    for _ in range(50 if packing else 100):
        taken.append(next(steps))
        states.append(json.loads(json.dumps(steps.state_dict())))
    assert steps.epoch >= 2
    steps.close()
    for done in range(0, len(taken), 7):
        again = stream_loader(path, **options)
        again.load_state_dict(states[done])
        assert all(same_batches(next(again), step) for step in taken[done : done + 3])
        assert again.state_dict() == states[min(done + 3, len(taken))] or done + 3 > len(taken)
        again.close()


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
    steps = stream_loader(path)
    for _ in range(9):
        next(steps)
    state = steps.state_dict()
    steps.close()
    fresh = stream_loader(path)
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
        stream_loader(path)  # rows are tokenised many at a time
    steps = stream_loader(path, bad_rows="skip")
    for _ in range(50):
        next(steps)
    assert "left out 1 bad rows so far" in caplog.text
    steps.close()
    path.write_text('{"text": ""}\n')
    with pytest.raises(InputError):
        stream_loader(path)


def test_a_stream_of_the_hub_is_read_like_its_rows(path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    hub = datasets.IterableDataset.from_generator(lambda: iter(rows))
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.update(k) or hub)
    here, there = stream_loader(path), stream_loader("someone/something")
    assert asked["streaming"] is True
    for _ in range(30):
        assert same_batches(next(here), next(there))
    here.close()
    there.close()
