"""Runs that distil a teacher, or stream their reference: a kept one is the same."""

import shutil

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain.model.companions import tokenizer_files
from tests.cli.cases import MISTAKES, change_run, records, sets, tiny_llama
from tests.cli.test_ranks import assert_same_run, one_rank, two_then_three
from tests.parity.cases import noisy
from tests.sweeps import few

FILE = "model/model.safetensors"


@pytest.fixture(scope="session")
def teacher(base, tmp_path_factory):
    """A model of other sizes with the tokenizer of `base`."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = tiny_llama(vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=3)
    config.pop("model_type")
    torch.manual_seed(3)
    noisy(LlamaForCausalLM(LlamaConfig(**config))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def distilling(run_file, base, teacher):
    def made(**changes):
        loss = {"name": "distill", "teacher": str(teacher), "top_k": 5} | changes
        return change_run(run_file, model={"path": str(base)}, loss=loss)

    return made


@pytest.mark.parametrize("packing", few([True, False]), ids=["packed", "padded"])
def test_a_teacher_is_learnt_and_a_run_goes_on_exactly(
    megatrain, distilling, teacher, tmp_path, packing
):
    own = shutil.copytree(teacher, tmp_path / "teacher")
    file = distilling(teacher=str(own), beta=0.4, add_tail=True, temperature=1.5)
    alone = sets(data__packing=packing, training__micro_batch_size=1)
    whole, run = megatrain.resumed(file, 8, 2, *alone)
    assert all(record["teacher_seconds"] > 0 for record in records(whole, "grad_norm"))
    losses = [record["eval_loss"] for record in records(whole, "eval_loss")]
    assert 0 < losses[-1] < 0.9 * losses[0]
    before = (run / FILE).read_bytes()
    noisy(LlamaForCausalLM.from_pretrained(own)).save_pretrained(own)
    more = [*alone, *sets(output__folder=str(run), training__steps=9)]
    megatrain.refused("has changed since the run began", "train", file, *more, "--resume")
    assert (run / FILE).read_bytes() == before


@pytest.mark.parametrize("told", MISTAKES["distilled"])
def test_what_cannot_be_distilled_is_refused_in_a_line(megatrain, distilling, told):
    megatrain.refused(told, "train", distilling(), *sets(**MISTAKES["distilled"][told]))


def test_a_teacher_with_fewer_rows_or_other_tokens_is_refused(
    megatrain, distilling, teacher, tmp_path
):
    own = shutil.copytree(teacher, tmp_path / "teacher")
    file, model = distilling(teacher=str(own)), LlamaForCausalLM.from_pretrained(own)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows - 3)
    model.save_pretrained(own)
    said = f"{own} has {rows - 3} embeddings, and its tokenizer needs {rows};"
    megatrain.refused(said, "train", file)
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(own)
    megatrain.refused("another vocabulary than the model that is trained", "train", file)
    for path in list(tokenizer_files(own)):
        path.unlink()
    megatrain.refused("no tokenizer in this folder: copy its", "train", file)
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_ranks_distil_as_one(megatrain, distilling, tmp_path):
    file = distilling(beta=0.4, add_tail=True, temperature=1.5)
    one_rank(megatrain, file)
    two_then_three(file, tmp_path, 2)  # one has no row of a step
    assert_same_run(tmp_path / "one", tmp_path / "several")
