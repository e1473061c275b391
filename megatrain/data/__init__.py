"""Data: from files to the steps that the engine takes.

Read in this order: `sources` (which files), `readers` (their rows), `encoders` (their tokens),
`token_store` (tokens on disk), `row_packing` (documents that share a row), `dataset` (batches),
`loader` (the endless order of steps). `tokenise.open_dataset` calls all but the last in turn.
"""

from megatrain.data.dataset import PLAIN, PackedDataset, ReplyDataset, numbered
from megatrain.data.demo_corpus import stdlib_corpus, train_bpe_tokenizer
from megatrain.data.images import ImageProcessor
from megatrain.data.loader import Step, StepLoader
from megatrain.data.prompts import PromptRow, Prompts, open_prompts
from megatrain.data.tokenise import open_dataset
from megatrain.data.tokenizer import load_tokenizer
