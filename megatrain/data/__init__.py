"""Data: from files to the steps that the engine takes.

Read in this order: `sources` (which files), `readers` (their rows, checked), `text` and `chat`
(tokens), `store` (kept on disk), `packing` (which share a row), `dataset` (batches), `loader`
(their endless order); `stream` stands for the last three where tokens are not kept.
`opening` ties them together.
"""

from megatrain.data.dataset import MicroBatch, PackedDataset
from megatrain.data.demo import stdlib_corpus, train_bpe_tokenizer
from megatrain.data.loader import Step, StepLoader, StreamLoader
from megatrain.data.opening import open_dataset, open_stream
from megatrain.data.preferences import PLAIN, ReplyDataset, at_first_label, numbered, plain_rows
from megatrain.data.prompt_rows import PromptRow, Prompts, open_prompts
from megatrain.data.stream import Stream
from megatrain.data.teacher_file import IDS, LOG_PROBS, TeacherAnswers, open_teacher_file
from megatrain.data.tokenizer import load_tokenizer
