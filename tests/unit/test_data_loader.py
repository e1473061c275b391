"""The order of steps is found again exactly."""

import json
import threading

import pytest

from megatrain.data import StepLoader, open_dataset
from megatrain.errors import InputError
from tests.unit.data_cases import make_tokenizer, write_jsonl

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


@pytest.mark.parametrize("name", ["rows_per_step", "rows_per_micro_batch"])
def test_steps_without_rows_are_refused(data, name):
    with pytest.raises(InputError, match="must be 1 or more"):
        loader(data, **{name: 0})


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
    assert loader(data, rows_per_step=5).steps_of(1e-9) == 1


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


def test_a_resume_may_change_rows_per_step(data):
    rows = [row for step in take(loader(data, rows_per_step=1), 40) for row in step]
    first = loader(data, rows_per_step=4)
    take(first, 3)
    second = loader(data, rows_per_step=7, workers=2)
    next(second)  # what it did before does not matter, nor what it prepared ahead
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (found,) = take(second, 1)
    assert sorted(found) == sorted(rows[12:19]) and second.epoch == 19 / ROWS
    second.close()
    third = loader(data, rows_per_step=2)
    third.load_state_dict(second.state_dict())
    assert sorted(take(third, 1)[0]) == sorted(rows[19:21])
    assert third.state_dict()["steps"] == 5 and third.state_dict()["rows"] == 21


def test_other_data_settings_or_seed_are_refused_on_resume(datasets):
    state = loader(datasets[False]).state_dict()
    with pytest.raises(InputError, match=f"fingerprint '{state['fingerprint']}', now"):
        loader(datasets[True]).load_state_dict(state)
    with pytest.raises(InputError, match="with seed 1, this one with 2"):
        loader(datasets[False], seed=2).load_state_dict(state)


def test_threads_end_with_close(data):
    before = threading.active_count()
    steps = loader(data, workers=3)
    next(steps)
    assert threading.active_count() > before
    steps.close()
    steps.close()
    assert threading.active_count() == before
    assert rows_of(next(steps)) == take(loader(data), 2)[1]
