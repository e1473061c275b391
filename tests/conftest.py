"""Settings of all tests, and a tokenizer."""

import gc
import os
import sys
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

# How long an input takes to make says how busy the machine is, nothing about what is tested; the
# first one also pays for hypothesis' own tables.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

gc.disable()  # what is imported and collected stays to the end

# Nothing that a test writes need outlive the machine: a third of the time of a small save. Tests of
# saves note that they are flushed, and when.
os.fsync = lambda file: None

# Else each engine reads the limits of its cgroups and of the machine half a dozen times: a quarter
# of the time to open a tiny one.
os.environ.setdefault("MEGATRAIN_HOST_MEMORY", "64GiB")

# Else each run asks git twice, a twentieth of its time.
os.environ.setdefault("MEGATRAIN_COMMIT", "0" * 40)


def pytest_collection_finish() -> None:
    """The garbage collector need not look at it, then or later."""
    gc.freeze()
    gc.enable()


GROWTH_BYTES, GROWTH_MODULES = 512 << 20, 200
_allowed = 0, 0


def pytest_runtest_logfinish() -> None:
    """Engines lie in cycles, and the collector counts objects, not what their tensors take.

    Without this a worker grows to 9 GB, and the machine takes longer to find memory than the tests.
    What is left then, modules above all, stays to the end: the collector passes over it later.
    """
    global _allowed
    process = psutil.Process()
    if process.memory_info().rss > _allowed[0] or len(sys.modules) > _allowed[1]:
        gc.collect()
        gc.freeze()
        _allowed = process.memory_info().rss + GROWTH_BYTES, len(sys.modules) + GROWTH_MODULES


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """The order of sums, and so the last bits, must not depend on the machine's cores."""
    if "torch" not in sys.modules or request.node.get_closest_marker("gpu"):
        yield
        return
    from megatrain.compat.torch import one_thread

    with one_thread():
        yield


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep nothing in the user's cache folder, and find nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    from megatrain.data import train_bpe_tokenizer
    from tests.cli.cases import SENTENCES

    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "corpus.txt"
    text.write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([text], 300, folder)
    return folder
