"""Data: from files to the steps that the engine takes.

Read in this order: `sources` (which files), `readers` (their rows, checked), `text` and `chat`
(tokens), `store` (kept on disk), `packing` (which share a row), `dataset` (batches), `loader`
(their endless order). `opening.open_dataset` ties them together.
"""

from megatrain.data.dataset import MicroBatch, PackedDataset
from megatrain.data.demo import stdlib_corpus, train_bpe_tokenizer
from megatrain.data.loader import Step, StepLoader
from megatrain.data.opening import open_dataset
from megatrain.data.tokenizer import load_tokenizer

__all__ = [
    "MicroBatch",
    "PackedDataset",
    "Step",
    "StepLoader",
    "load_tokenizer",
    "open_dataset",
    "stdlib_corpus",
    "train_bpe_tokenizer",
]
