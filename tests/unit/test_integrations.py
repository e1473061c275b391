"""A streamed Trainer is the plain one: its log, weights, adapters, metrics, and resumes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from megatrain.errors import InputError
from tests.families.tiny import tiny_model
from tests.inside import program_of
from tests.parity.cases import frozen
from tests.sweeps import few, quick, swept
from tests.unit.data_cases import chat_tokenizer
from tests.unit.trainer_cases import (
    Streamed,
    alike,
    arguments,
    lines,
    mixed,
    padded,
    rows,
    same_weights,
    small,
    text_trainer,
    trainer,
)


class OwnTrainer(Trainer):
    """What a user has already."""


def test_a_streamed_trainer_learns_what_a_plain_one_does(tmp_path):
    """16 rows in micro-batches of 2, 3 of them a step: the last step of an epoch has 2."""
    made = alike(
        lambda kind: trainer(kind, tmp_path / kind.__name__, remove_unused_columns=True),
        (Trainer, mixed(OwnTrainer)),
        near=1e-5,
    )
    same_weights(*made)
    assert sum("eval_loss" in entry for entry in lines(made[0])) == 3


class WithoutKwargs(LlamaForCausalLM):
    """A model that a Trainer cannot tell how many labels a step has."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask, labels=labels, use_cache=False)


def without_kwargs():
    made = WithoutKwargs(small().config)
    made.load_state_dict(small().state_dict())
    return made


class Stream(IterableDataset):
    """Rows without a length: a step at their end is short, and goes on with the next epoch's."""

    def __iter__(self):
        return iter(rows(9))


def streamed(**options):
    """A trainer that gives its engine these options."""
    return type("WithOptions", (Streamed,), {"engine_options": options})


Unsaved = streamed(saveable=False)  # for models of a class that no checkpoint could name


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
            (small, Stream()),
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
        losses_and_norms(kind, small(), rows(4), tmp_path, use_cache=False, logits_to_keep=0)
        for kind in (Trainer, Unsaved)
    )
    assert torch.tensor(got).allclose(torch.tensor(wanted), rtol=1e-5)
    for name, value in {"names": ["a", "b"], "use_cache": True, "logits_to_keep": 1}.items():
        with pytest.raises(InputError, match=f"micro-batch 0 has '{name}', "):
            losses_and_norms(Unsaved, small(), rows(4), tmp_path, **{name: value})


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


def of_classes(kind):
    return getattr(transformers, f"LlamaFor{kind}Classification")(small().config)


PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def test_a_trainer_in_bf16_may_multiply_in_float8_and_goes_on_so(tmp_path):
    trainers = []
    for start in (None, str(tmp_path / "checkpoint-2")):
        model = get_peft_model(small(), LoraConfig(r=4, target_modules="all-linear"))
        args = arguments(tmp_path, bf16=True, max_steps=3, eval_strategy="no")
        trainers.append(
            streamed(precision="fp8")(model, args, train_dataset=rows(16), data_collator=padded)
        )
        trainers[-1].train(resume_from_checkpoint=start)
    first, second = (dict(made.engine.named_masters()) for made in trainers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert program_of(trainers[1].engine).kinds[0].module.mlp.up_proj.base_layer.codes is None


@pytest.mark.parametrize(
    ("kind", "changes", "options", "message"),
    [
        (streamed(precision="bf16"), {}, {},
         r"engine_options\['precision'\]: it follows from the Trainer's"),
        (streamed(host_memry="1GiB"), {}, {},
         r"engine_options\['host_memry'\]: megatrain.Engine has no such option"),
        (streamed(model=None), {}, {}, r"engine_options\['model'\]: it follows from"),
        (streamed(adapter={"r": 4}), {}, {}, r"engine_options\['adapter'\]: give a PeftModel"),
        (Streamed, {"optim": "adafactor"}, {}, "args.optim: it must be adamw_torch"),
        (Streamed, {"save_only_model": True, "load_best_model_at_end": True, "save_steps": 2}, {},
         "args.save_only_model"),
        (Streamed, {"metric_for_best_model": "eval_a_mean_token_accuracy"}, {},
         "args.metric_for_best_model: the engine does not measure it"),
        (Streamed, {}, {"compute_loss_func": lambda *given, **more: 0}, "compute_loss_func"),
        (Streamed, {}, {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers"),
        # A plain Trainer adds the means of their micro-batches, and does not average.
        (Streamed, {"model": of_classes("Token")}, {}, "LlamaForTokenC.* classes a run file"),
        (Streamed, {"model": of_classes("Sequence")}, {}, "LlamaForSequenceC.* classes a run file"),
        (Streamed, {"model": get_peft_model(small(), PROMPTS)}, {}, r"PromptTuning|PROMPT_TUNING"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_by_name(tmp_path, kind, changes, options, message):
    with pytest.raises(InputError, match=message):
        trainer(kind, tmp_path, options=options, **changes)


def test_a_new_head_is_drawn_by_the_seed(tmp_path):
    """As RewardTrainer draws that of a model which is named and has none."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = chat_tokenizer("qwen")
    small(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
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


@pytest.mark.parametrize("lost", [None, *few(["scheduler.pt", "trainer_state.json"])])
def test_a_checkpoint_without_all_parts_is_refused_before_the_engine_is_closed(tmp_path, lost):
    """None: it has the weights alone."""
    steps = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "save_only_model": not lost}
    made = trainer(Streamed, tmp_path, **steps)
    made.train()
    if lost:
        (tmp_path / "checkpoint-1" / lost).unlink()
    told = f"has no {lost or 'megatrain'}: .*without save_only_model"
    with pytest.raises(InputError, match=told):
        made.train(resume_from_checkpoint=True)
    made.train()


def test_a_checkpoint_of_another_model_is_not_gone_on_with(tmp_path):
    """Its engine would take the place of the one that the trainer was given."""
    steps = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
    trainer(Streamed, tmp_path, **steps).train()
    others = type("Decaying", (Streamed,), {"get_decay_parameter_names": lambda *_: ["lm_head"]})
    parameters = "set of trained or decayed parameters"
    for model, kind, other in (
        (lambda: frozen(small(), lambda name: "lm_head" not in name), Streamed, parameters),
        (small, others, parameters),
        (partial(small, num_hidden_layers=2), Streamed, "number of parameters"),
        (partial(small, rms_norm_eps=0.1), Streamed, "rms_norm_eps"),
    ):
        made = trainer(kind, tmp_path, model=model(), **steps | {"max_steps": 2})
        with pytest.raises(InputError, match=f"checkpoint-1, whose model has another {other}"):
            made.train(resume_from_checkpoint=True)


def test_options_of_the_engine_that_a_checkpoint_has_otherwise_are_refused(tmp_path):
    """Its engine takes the place of the trainer's, and would go on without them."""
    steps = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "bf16": True}
    lora = LoraConfig(target_modules=["q_proj"])
    for name, value, model in (
        ("router_z_loss_coef", 0.1, partial(tiny_model, "mixtral")),
        ("base", "nf4", lambda: get_peft_model(small(), lora)),
    ):
        trainer(Streamed, tmp_path, model=model(), **steps).train()
        made = trainer(streamed(**{name: value}), tmp_path, model=model(), **steps)
        with pytest.raises(InputError, match=f"whose model has another .*{name}"):
            made.train(resume_from_checkpoint=True)


def test_settings_of_an_adapter_are_those_of_the_checkpoint(tmp_path):
    """They decide what its weights do, which are the checkpoint's."""

    def with_adapter(**changes):
        config = LoraConfig(**{"target_modules": ["q_proj"], "lora_alpha": 4} | changes)
        few = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
        return trainer(Streamed, tmp_path, model=get_peft_model(small(), config), **few)

    with_adapter().train()
    for changes in ({"lora_alpha": 8}, {"use_rslora": True}, {"lora_dropout": 0.5}):
        with pytest.raises(InputError, match=f"whose model has another {next(iter(changes))}"):
            with_adapter(**changes).train(resume_from_checkpoint=True)
    with_adapter(init_lora_weights="gaussian").train(resume_from_checkpoint=True)


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
        Streamed(small(), args, train_dataset=rows(4), **options)


def test_an_adapter_comes_as_a_peft_model(tmp_path):
    model, config = small(), LoraConfig(target_modules=["q_proj"])
    get_peft_model(model, config).save_pretrained(tmp_path)
    added = small()
    added.add_adapter(config)
    for given, name in (
        (str(tmp_path), "an adapter's folder"),
        (added, "a model with add_adapter"),
    ):
        with pytest.raises(InputError, match=f"{name}: give .*PeftModel"):
            Streamed(given, arguments(tmp_path / "out"), train_dataset=rows(4))


# PEFT's adapters under a streamed Trainer are trained as under the plain one.


def adapter_trainer(kind, folder, keys, **changes):
    torch.manual_seed(0)  # adapters are drawn
    config = LoraConfig(**({"r": 4, "target_modules": "all-linear"} | keys))
    return kind(
        get_peft_model(small(), config),
        arguments(folder, weight_decay=0.5, **changes),
        train_dataset=rows(16),
        eval_dataset=rows(5, seed=1),
        data_collator=padded,
    )


BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}


@pytest.mark.parametrize(
    ("keys", "changes"),
    few(
        [
            ({"modules_to_save": ["norm"], "use_rslora": True}, {}),  # norms are not decayed
            ({}, {"remove_unused_columns": True}),  # by the base's forward; PeftModel's takes any
            ({"use_dora": True}, BEST),
        ]
    ),
)
def test_an_adapter_learns_what_it_does_under_the_plain_one(tmp_path, keys, changes):
    made = alike(
        lambda kind: adapter_trainer(kind, tmp_path / kind.__name__, keys, **changes), near=1e-5
    )
    same_weights(*made)
    whole = PeftModel.from_pretrained(small(), tmp_path / "Streamed")
    described = json.loads((tmp_path / "Streamed/adapter_config.json").read_text())
    assert described["r"] == 4 and whole.peft_config["default"].use_dora == ("use_dora" in keys)


def lora(**keys):
    torch.manual_seed(0)
    return LoraConfig(r=4, target_modules="all-linear", **keys)


# The class, what it is made with, and what its adapter is for.
OF_TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "rows": ("SFTTrainer", {}, {}, "CAUSAL_LM"),
    "packed": ("SFTTrainer", {}, {"packing": True, "max_length": 24}, "CAUSAL_LM"),
    "pairs": ("DPOTrainer", {}, {}, "CAUSAL_LM"),
    "scores of no task": ("RewardTrainer", {"modules_to_save": ["score"]}, {}, "SEQ_CLS"),
}


@pytest.mark.parametrize("name", quick(OF_TRL, ("scores of no task",)))
def test_trls_peft_config_is_followed(tmp_path, name):
    """Where TRL is installed, which no test needs."""
    trl = pytest.importorskip("trl")
    of, keys, changes, task = OF_TRL[name]
    plain = getattr(trl, of)

    def make(kind):
        return text_trainer(kind, tmp_path, options={"peft_config": lora(**keys)}, **changes)

    made = alike(make, (plain, mixed(plain)), near=1e-5)
    same_weights(*made)
    described = Path(made[1].args.output_dir) / "adapter_config.json"
    assert json.loads(described.read_text())["task_type"] == task


# `compute_metrics` and `predict` of a streamed Trainer are the plain one's, as memory allows.


def share_right(given):
    """Of the labelled tokens; predictions are logits, or the likeliest tokens."""
    likely = given.predictions
    likely = likely.argmax(-1) if likely.ndim == 3 else likely
    labels = given.label_ids[:, 1:]
    likely = likely[:, :-1][labels >= 0]
    right = float((likely == labels[labels >= 0]).mean())
    return {"right": right, "mean": float(likely.mean()), "of": labels.size}


def likeliest(logits, labels):
    return logits.argmax(-1)


@swept(together=0, preprocess=[None, likeliest], changes={"fp32": {}, "bf16": {"bf16": True}})
def test_metrics_are_computed_as_under_the_plain_one(tmp_path, preprocess, changes):
    """In two batches of other widths; the best is of the metric, too."""
    options = {"compute_metrics": share_right, "preprocess_logits_for_metrics": preprocess}
    changes = changes | {"metric_for_best_model": "mean", "load_best_model_at_end": True}
    exact, found = "bf16" not in changes, []
    for kind in (Trainer, Streamed):
        made = trainer(kind, tmp_path / kind.__name__, options=options, **changes)
        made.train()
        evaluated = [entry for entry in made.state.log_history if "eval_right" in entry]
        assert len({entry["eval_mean"] for entry in evaluated}) == 3
        found.append((evaluated, made.predict(rows(4, seed=2)), made.state.best_global_step))
    (plain, wanted, best), (streamed, got, also) = found
    near = 1e-4 if exact else 2e-2
    for one, other in zip(plain, streamed, strict=True):
        assert other["eval_of"] == one["eval_of"] > 0
        assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=near)
        for name in ("eval_right", "eval_mean"):
            assert other[name] == one[name] or not exact
    assert got.predictions.shape == wanted.predictions.shape and best is not None
    assert (got.label_ids == wanted.label_ids).all()
    assert got.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=near)
    assert also == best or not exact
    if exact and preprocess is None:
        assert got.predictions == pytest.approx(wanted.predictions, rel=1e-4, abs=1e-5)


def held(given):
    """What there is to measure by."""
    every = {"of": given.predictions, "inputs": given.inputs, "losses": given.losses}
    return {
        name: float(sum(part.sum() for part in value)) + len(value)
        for name, value in every.items()
        if value is not None
    }


@pytest.mark.parametrize(
    "changes",
    few([{"include_for_metrics": ["inputs", "loss"]}, {"eval_do_concat_batches": False},
         {"prediction_loss_only": True}]),
)  # fmt: skip
def test_what_metrics_are_given_is_as_under_the_plain_one(tmp_path, changes):
    plain, streamed, usual = (
        trainer(kind, tmp_path, options={"compute_metrics": held}, **more).evaluate()
        for kind, more in ((Trainer, changes), (Streamed, changes), (Trainer, {}))
    )
    of, got, otherwise = (
        {n: v for n, v in metrics.items() if n.endswith(("_of", "_inputs", "_losses"))}
        for metrics in (plain, streamed, usual)
    )
    assert got == pytest.approx(of, rel=1e-4) and of != otherwise
