"""`megatrain demo`: trains and samples a small model of Python's own library, without downloads."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatrain import config
from megatrain.base.shipped import shipped
from megatrain.base.units import MIB
from megatrain.base.whole_files import whole_folder
from megatrain.cli.generate import opened, print_texts
from megatrain.cli.train import say_end
from megatrain.data import stdlib_corpus, train_bpe_tokenizer
from megatrain.generate.sampling import Sampling
from megatrain.run_folder.layout import METRICS
from megatrain.telemetry.metrics import read_metrics
from megatrain.train.loop import train

CORPUS = Path("runs/demo-data/corpus")
TOKENIZER = Path("runs/demo-data/tokenizer")
CORPUS_BYTES = 12 * MIB
VOCAB_SIZE = 4096
PROMPTS = ("def read_", "class Base")


def run_demo(overrides: Sequence[str]) -> None:
    """Make corpus and tokenizer, train, print loss and samples; all files are below `runs/`."""
    run_file = config.load(shipped("examples/demo.yaml"), overrides)
    write_corpus_and_tokenizer()
    outcome = train(run_file, "demo")
    if outcome.stopped:
        return say_end(outcome)
    losses = [r["loss"] for r in read_metrics(outcome.folder / METRICS) if r.get("loss")]
    if losses:
        ends = f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last"
        print(f"\n{ends} ({outcome.folder / 'loss.png'})\n")
    engine, sampling = run_file.engine, Sampling(max_new_tokens=96, temperature=0.6)
    with opened(str(outcome.folder), engine.device, engine.precision) as run:
        for prompt in PROMPTS:
            print(f"--- sampled from the model, prompt {prompt!r}")
            print_texts(*run, [prompt], sampling)
    print(f"\nThe run is in {outcome.folder}; more of it:")
    print(f"  megatrain report {outcome.folder}")
    print(f"  megatrain generate {outcome.folder} --prompt 'import ' --precision fp32")


def write_corpus_and_tokenizer() -> None:
    """Make the corpus and the tokenizer, unless an earlier demo has made them."""
    files = stdlib_corpus(CORPUS_BYTES)
    if not CORPUS.exists():
        with whole_folder(CORPUS) as folder:
            for number, path in enumerate(files):
                shutil.copyfile(path, folder / f"{number:04d}-{path.stem}.txt")
    if not TOKENIZER.exists():
        print(f"training a tokenizer on {len(files)} files of the standard library")
        with whole_folder(TOKENIZER) as folder:
            train_bpe_tokenizer(sorted(CORPUS.iterdir()), VOCAB_SIZE, folder)
