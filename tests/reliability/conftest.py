"""One process to fork runs from, and a tokenizer."""

import pytest

from megatrain.data import train_bpe_tokenizer
from tests.cli.cases import SENTENCES
from tests.reliability.cases import Zygote


@pytest.fixture(scope="session")
def zygote():
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "corpus.txt"
    text.write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([text], 300, folder)
    return folder
