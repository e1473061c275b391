"""Data: from files to the steps that the engine takes.

Read in this order: `sources` (which files), `readers` (their rows, checked), `encoders`
(tokens), `token_store` (kept on disk), `row_packing` (which share a row), `dataset` (batches),
`loader` (their endless order). `tokenise` calls them in turn.
"""

from megatrain.data.dataset import PLAIN, PackedDataset, ReplyDataset, numbered
from megatrain.data.demo_corpus import stdlib_corpus, train_bpe_tokenizer
from megatrain.data.images import ImageProcessor
from megatrain.data.loader import Step, StepLoader
from megatrain.data.prompts import PromptRow, Prompts, open_prompts
from megatrain.data.tokenise import open_dataset
from megatrain.data.tokenizer import load_tokenizer
