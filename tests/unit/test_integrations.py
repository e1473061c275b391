"""A streamed Trainer is the plain one: losses, norms, rates, evaluations, weights, and a resume."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from data_cases import chat_tokenizer
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from megatrain.errors import InputError
from megatrain.integrations import StreamedTrainer
from tests.parity.cases import llama
from tests.sweeps import few
from tests.unit.trainer_cases import (
    Stop,
    Streamed,
    arguments,
    lines,
    mixed,
    padded,
    rows,
    same,
    same_weights,
    trainer,
    weights,
)


class OwnTrainer(Trainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)


def test_a_streamed_trainer_learns_what_a_plain_one_does(tmp_path):
    """16 rows in micro-batches of 2, 3 of them a step: the last step of an epoch has 2."""
    made = []
    for kind in (Trainer, mixed(OwnTrainer)):
        made.append(trainer(kind, tmp_path / kind.__name__, remove_unused_columns=True))
        made[-1].train()
    same(*made, near=1e-5)
    same_weights(*made)
    assert sum("eval_loss" in entry for entry in lines(made[0])) == 3


class WithoutKwargs(LlamaForCausalLM):
    """A model that a Trainer cannot tell how many labels a step has."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask, labels=labels, use_cache=False)


def without_kwargs():
    made = WithoutKwargs(llama().config)
    made.load_state_dict(llama().state_dict())
    return made


class Stream(IterableDataset):
    """Rows without a length: a step at their end is short, and goes on with the next epoch's."""

    def __iter__(self):
        return iter(rows(9))


class Unsaved(Streamed):
    """For models of a class that no checkpoint could name."""

    engine_options: ClassVar[dict[str, Any]] = {"saveable": False}


def losses_and_norms(kind, model, data, folder, **also):
    made = kind(
        model,
        arguments(folder, eval_strategy="no", save_strategy="no"),
        train_dataset=data,
        data_collator=lambda rows: padded(rows) | also,
    )
    made.train()
    return [[e["loss"], e["grad_norm"]] for e in made.state.log_history if "loss" in e]


@pytest.mark.parametrize(
    ("make", "data"),
    few(
        [
            (without_kwargs, rows(5)),
            (without_kwargs, rows(9)),
            (without_kwargs, Stream()),
            (llama, Stream()),
        ],
        *(1, 3),
    ),
    ids=["means", "means and short steps", "means of a stream", "stream"],
)
def test_uneven_micro_batches_count_as_a_plain_trainer_counts_them(tmp_path, make, data):
    """The last micro-batch has one row."""
    wanted, got = (losses_and_norms(kind, make(), data, tmp_path) for kind in (Trainer, Unsaved))
    assert len(wanted) == 5
    assert torch.tensor(got).flatten().tolist() == pytest.approx(
        torch.tensor(wanted).flatten().tolist(), rel=1e-5
    )


def test_what_is_no_tensor_in_a_batch_is_honoured_or_refused(tmp_path):
    wanted, got = (
        losses_and_norms(kind, llama(), rows(4), tmp_path, use_cache=False, logits_to_keep=0)
        for kind in (Trainer, Unsaved)
    )
    assert torch.tensor(got).allclose(torch.tensor(wanted), rtol=1e-5)
    for name, value in {"names": ["a", "b"], "use_cache": True, "logits_to_keep": 1}.items():
        with pytest.raises(InputError, match=f"micro-batch 0 has '{name}', "):
            losses_and_norms(Unsaved, llama(), rows(4), tmp_path, **{name: value})


def test_a_streamed_trainer_goes_on_exactly(tmp_path):
    whole = trainer(Streamed, tmp_path / "whole")
    whole.train()
    parted = trainer(Streamed, tmp_path / "parted")
    parted.add_callback(Stop())
    parted.train()
    again = trainer(Streamed, tmp_path / "parted")
    again.train(resume_from_checkpoint=True)
    first, second = weights(whole), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert lines(whole)[:-1] == lines(again)[:-1]
    assert sum("loss" in entry for entry in lines(whole)) == 5


def test_a_step_that_is_broken_off_is_not_part_of_the_next_run(tmp_path):
    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            control.should_training_stop = True

    few = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    fresh, stopped = (trainer(Streamed, tmp_path, **few) for _ in range(2))
    stopped.add_callback(Stop())
    stopped.train()
    stopped.remove_callback(Stop)
    assert stopped.train().training_loss == fresh.train().training_loss


def test_the_best_state_is_loaded(tmp_path):
    best = trainer(
        Streamed, tmp_path / "best", load_best_model_at_end=True, greater_is_better=True,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    best.train()
    step = Path(best.state.best_model_checkpoint)
    assert step.name == "checkpoint-2"  # the loss falls
    kept, loaded = load_file(step / "model.safetensors"), weights(best)
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)


class Precise(StreamedTrainer, Trainer):
    engine_options: ClassVar = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("kind", "changes", "options", "message"),
    [
        (Precise, {}, {}, r"engine_options\['precision'\]: it follows from the Trainer's"),
        (Streamed, {"optim": "adafactor"}, {}, "args.optim: it must be adamw_torch"),
        (
            Streamed,
            {"save_only_model": True, "load_best_model_at_end": True, "save_steps": 2},
            {},
            "args.save_only_model",
        ),
        (
            Streamed,
            {"metric_for_best_model": "eval_mean_token_accuracy"},
            {},
            "args.metric_for_best_model: the engine does not measure it",
        ),
        (Streamed, {}, {"compute_loss_func": lambda *given, **more: 0}, "compute_loss_func"),
        (Streamed, {}, {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tmp_path, kind, changes, options, message):
    with pytest.raises(InputError, match=message):
        trainer(kind, tmp_path, options=options, **changes)


def test_a_new_head_is_drawn_by_the_seed(tmp_path):
    """As RewardTrainer draws that of a model which is named and has none."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = chat_tokenizer("qwen")
    llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    data = datasets.Dataset.from_list([{"chosen": "the sea", "rejected": "the 1"}])
    pad = {"pad_token_id": tokenizer.pad_token_id}
    made = []
    for kind in (trl.RewardTrainer, mixed(trl.RewardTrainer)):
        torch.manual_seed(len(made))
        args = trl.RewardConfig(str(tmp_path / "out"), use_cpu=True, bf16=False)
        args.model_init_kwargs = dict(pad)
        made.append(kind(str(tmp_path), args, train_dataset=data, processing_class=tokenizer))
    masters = dict(made[1].engine.named_masters())
    assert torch.equal(masters["score.weight"], made[0].model.score.weight)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"revision": "other"}, {}, "args.model_init_kwargs: load the model with them"),
        ({"quantization_config": object()}, {}, "quantization_config: train on a packed base"),
        ({}, {"quantization_config": object()}, "quantization_config: train on a packed base"),
    ],
)
def test_a_model_is_not_loaded_otherwise(tmp_path, changes, options, message):
    """By what TRL's arguments say of a model that is there, or of one that would be quantised."""
    args = arguments(tmp_path)
    args.model_init_kwargs = changes
    with pytest.raises(InputError, match=message):
        Streamed(llama(), args, train_dataset=rows(4), **options)
