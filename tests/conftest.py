"""Settings of all tests, and a tokenizer."""

import pytest
from hypothesis import HealthCheck, settings

# How long an input takes to make says how busy the machine is, nothing about what is tested; the
# first one also pays for hypothesis' own tables.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    from megatrain.data import train_bpe_tokenizer
    from tests.cli.cases import SENTENCES

    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "corpus.txt"
    text.write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([text], 300, folder)
    return folder
