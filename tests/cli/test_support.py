"""docs/support.md says what the code does: cells of its tables are tried again."""

import re

import pytest

from benchmarks.support import BY_TRAINERS, FEATURES, PAGE, TRAINERS, Trials
from tests.cli.cases import leave_out

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
NAMES = [*FEATURES]
WHYS = dict(re.findall(r"^(\d+)\. (.+)$", PAGE_TEXT, re.MULTILINE))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def row(name):
    """The words of a row's cells, without the numbers of reasons."""
    [line] = re.findall(rf"^\| {re.escape(name)} \|(.+)\|$", PAGE_TEXT, re.MULTILINE)
    return [cell.split()[0] for cell in line.split("|") if cell.strip()]


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch.setattr)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Trials(tmp_path_factory.mktemp("trials"))


def assert_same(tried, shown, what):
    """A trial is as the page has it, unless a package that it needs is not here."""
    assert tried[0] == shown or "untested" in (tried[0], shown), (what, tried)


def test_the_page_is_whole():
    for at, name in enumerate(NAMES):
        assert len(row(f"**{name}**")) == at + 1 and row(f"**{name}**")[-1] == "yes"
    for name in BY_TRAINERS:
        assert len(row(name or "all parameters")) == len(TRAINERS)
    numbers = re.findall(r"\| (?:no|untested) (\d+) ", PAGE_TEXT)
    assert {*numbers} == {*WHYS}


def test_some_trials_come_out_as_the_page_says(trials):
    sets = ("packing", "shared rows"), ("LoRA", "DPO")
    for pair, tried in zip(sets, trials.together(*sets), strict=True):
        assert_same(tried, row(f"**{pair[1]}**")[NAMES.index(pair[0])], pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_features_go_together_as_the_page_says(trials, name):
    cells = row(f"**{name}**")
    sets = [(name,) if other == name else (other, name) for other in NAMES[: len(cells)]]
    for together, tried, cell in zip(sets, trials.together(*sets), cells, strict=True):
        assert_same(tried, cell, together)


@pytest.mark.exhaustive
@pytest.mark.parametrize("feature", BY_TRAINERS)
def test_a_feature_goes_with_trainers_as_the_page_says(trials, feature):
    for trainer, cell in zip(TRAINERS, row(feature or "all parameters"), strict=True):
        assert_same(trials.by_trainer(trainer, feature), cell, (trainer, feature))
