"""What a trainer is told is heeded as the plain one heeds it, or refused by name."""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.optim.lr_scheduler import StepLR
from transformers import (
    AutoConfig,
    EarlyStoppingCallback,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from megatrain.api import Engine
from megatrain.errors import InputError
from megatrain.integrations import StreamedTrainer, heeded
from megatrain.integrations import trainer as trainer_module
from megatrain.integrations.objectives import Scores, Waiting
from megatrain.loss import DPO
from tests.families.tiny import tiny_model
from tests.refusals import table
from tests.sweeps import few, quick
from tests.unit.data_cases import chat_tokenizer, talk
from tests.unit.trainer_cases import (
    Streamed,
    alike,
    arguments,
    lines,
    mixed,
    padded,
    rows,
    same,
    small,
    text_trainer,
    trainer,
)

trl = pytest.importorskip("trl", reason="trl is no dependency")
pytest.importorskip("datasets")

TRAINERS = {
    Trainer: TrainingArguments,
    trl.SFTTrainer: trl.SFTConfig,
    trl.DPOTrainer: trl.DPOConfig,
    trl.RewardTrainer: trl.RewardConfig,
}
KINDS = ("methods", "attributes", "arguments", "options")


def library(kind):
    return [each for each in kind.__mro__ if each.__module__.startswith(("transformers", "trl"))]


def of(kind, trainer):
    """What a trainer of the installed version has."""
    classes = library(trainer)
    if kind == "methods":
        return {n for each in classes for n in vars(each) if n == "__init__" or n[:2] != "__"}
    if kind == "attributes":
        found = (re.findall(r"self\.(\w+)(?::[^=\n]+)? = ", inspect.getsource(c)) for c in classes)
        return {name for each in found for name in each}
    if kind == "arguments":
        return {field.name for field in fields(TRAINERS[trainer])}
    names = {n for each in classes for n in inspect.signature(each.__init__).parameters}
    return names - {"self", "model", "kwargs"} if kind == "options" else set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_every_name_of_the_installed_versions_once(kind):
    every = [n for table in heeded.NAMES[kind].values() for n in table] + [*heeded.REFUSED[kind]]
    assert len(every) == len({*every})
    assert {name for each in TRAINERS for name in of(kind, each)} == {*every}


SHORT = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "no", "eval_steps": 3}
SHORT["warmup_steps"] = 0
SAVES = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
HEEDED = table(__file__, "arguments.yaml")
USUAL = ("max_grad_norm", "plateau", "warmup_steps")  # the others exhaustively


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What is logged without a change."""
    made = trainer(Trainer, tmp_path_factory.mktemp("base"), **SHORT)
    made.train()
    return lines(made)


@pytest.mark.parametrize("name", quick(HEEDED["Trainer"], USUAL))
def test_an_argument_is_heeded(name, tmp_path, base):
    changed = SHORT | HEEDED["Trainer"][name]
    plain, _ = alike(lambda kind: trainer(kind, tmp_path / kind.__name__, **changed))
    assert lines(plain) != base


DATA: dict[str, list[dict[str, Any]]] = {
    "talks": [{"messages": talk(f"is {n}", "so")} for n in range(8)],
    "tokens": [
        {"input_ids": [5 + n, 6, 7], "labels": [-100, 6, 7] if n else [-100] * 3} for n in range(8)
    ],
}


@pytest.mark.parametrize("changes", few(HEEDED["TRL"], 2, 9, 14))
def test_an_argument_of_trl_is_heeded(changes, tmp_path):
    plain = getattr(trl, f"{changes['of']}Trainer")
    changes = {n: DATA[v] if n == "data" else v for n, v in changes.items() if n != "of"}
    made = alike(lambda kind: text_trainer(kind, tmp_path, **changes), (plain, mixed(plain)))
    assert lines(made[0]) != text_base(plain, tmp_path.parent)


@pytest.mark.parametrize(
    ("plain", "changes", "message"),
    [
        (trl.DPOTrainer, {"loss_type": ["sigmoid", "sft"]}, "args.loss_type: it must be one of"),
        (trl.DPOTrainer, {"label_smoothing": 0.1},
         "args.label_smoothing: DPOTrainer's sigmoid has none"),
        (trl.RewardTrainer, None, "pad_token_id is None: load it with .*pad_token_id=[0-9]"),
        (trl.RewardTrainer, 7, "pad_token_id is 7: load it with"),
    ],
)  # fmt: skip
def test_a_loss_or_model_of_trl_that_the_engine_does_not_have_is_refused(
    plain, changes, message, tmp_path
):
    model = None
    if not isinstance(changes, dict):
        config = small(vocab_size=len(chat_tokenizer("qwen"))).config
        config.num_labels, config.pad_token_id, changes = 1, changes, {}
        model = LlamaForSequenceClassification(config)
    with pytest.raises(InputError, match=message):
        text_trainer(mixed(plain), tmp_path, model, **changes)


def test_a_reference_with_fewer_rows_than_tokens_is_refused_by_name(tmp_path):
    rows = len(chat_tokenizer("qwen"))
    options = {"ref_model": small(vocab_size=rows - 2, max_position_embeddings=256)}
    told = (
        f"ref_model, whose embedding table has {rows - 2} rows: the tokenizer's tokens need {rows};"
    )
    with pytest.raises(InputError, match=told):
        text_trainer(mixed(trl.DPOTrainer), tmp_path, options=options)


def test_engines_are_told_of_steps_and_limits(tmp_path, monkeypatch):
    """So that `auto` leaves no room for other steps, nor the reference takes what is limited."""
    opened = Mock(wraps=Engine)
    monkeypatch.setattr(trainer_module, "Engine", opened)
    limited = type(
        "Limited", (mixed(trl.DPOTrainer),), {"engine_options": {"host_memory": 1 << 40}}
    )
    saves = {"max_length": 9, "max_steps": 1, "save_strategy": "steps", "eval_strategy": "no"}
    made = text_trainer(limited, tmp_path, **saves)
    reference, trained = (call.kwargs for call in opened.call_args_list)
    steps = {"sequence_length": 9, "micro_batch": 2 * 2, "tokens_per_step": 9 * 2 * 2 * 2}
    assert reference["host_memory"] == trained["host_memory"] == 1 << 40
    made.train()
    made.train(resume_from_checkpoint=True)
    for told in (trained, opened.load.call_args.kwargs):
        assert steps.items() <= told.items() and isinstance(told["loss"], DPO)


@cache
def text_base(kind, folder):
    made = text_trainer(kind, folder)
    made.train()
    return lines(made)


@pytest.mark.parametrize("adapter", few([True, False]))
@pytest.mark.parametrize("plain", few([trl.DPOTrainer, trl.SFTTrainer]))
@pytest.mark.parametrize("coefficient", few([0.9, None, 0.0]))
def test_the_loss_of_routers_is_that_of_trl(plain, coefficient, adapter, tmp_path):
    """By default as the configuration weighs it, whether or not that asks for it.

    What is saved says of it what the source said.
    """
    size = {"vocab_size": len(chat_tokenizer("qwen")), "max_position_embeddings": 256}
    asked = {"router_aux_loss_coef": 0.5, "output_router_logits": coefficient == 0}
    model = tiny_model("mixtral", changes=size | asked)
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])} if adapter else {}
    if plain is trl.SFTTrainer:  # evaluated by its logits, too
        options["compute_metrics"] = lambda given: {"mean": float(given.predictions.mean())}

    def make(kind):
        torch.manual_seed(0)
        changes = {"router_aux_loss_coef": coefficient}
        return text_trainer(
            kind, tmp_path, model, options=copy.deepcopy(options) or None, **changes
        )

    made = alike(make, (plain, mixed(plain)))
    made[1].model.save_pretrained(tmp_path, merged=adapter)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(saved, name) for name in asked} == asked
    wanted, got = (
        [value for e in m.state.log_history for name, value in e.items() if "aux_loss" in name]
        for m in made
    )
    assert got == pytest.approx(wanted, rel=1e-4) and len(got) == (0 if coefficient == 0 else 4)


def test_the_loss_of_routers_is_that_of_a_plain_trainer(tmp_path):
    """Which adds those of all micro-batches."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    data = {"train_dataset": rows(16), "eval_dataset": rows(5), "data_collator": padded}
    made = alike(
        lambda kind: kind(
            tiny_model("mixtral", changes=asked), arguments(tmp_path, **SHORT), **data
        )
    )
    assert made[1].state.log_history[0]["aux_loss"] > 0


@pytest.mark.exhaustive
def test_dropout_that_trl_switches_off_is_off_in_what_is_saved(tmp_path):
    size = {"vocab_size": len(chat_tokenizer("qwen")), "resid_pdrop": 0.3}
    model = tiny_model("gpt2", changes=size)
    _, streamed = alike(
        lambda kind: text_trainer(
            kind, tmp_path, model, options={"ref_model": copy.deepcopy(model)}
        ),
        (trl.DPOTrainer, mixed(trl.DPOTrainer)),
    )
    streamed.save_model(str(tmp_path))
    assert AutoConfig.from_pretrained(tmp_path).resid_pdrop == 0


def test_a_saved_configuration_has_the_token_ids_of_the_tokenizer(tmp_path):
    """A Trainer aligns them as training begins: a model generates until the tokenizer's end."""
    options = {"processing_class": chat_tokenizer("qwen")}
    configs = []
    for made in alike(lambda kind: trainer(kind, tmp_path, options=options, **SHORT)):
        made.save_model(str(tmp_path))
        configs.append(AutoConfig.from_pretrained(tmp_path).to_dict())
    plain, streamed = configs
    assert plain["eos_token_id"] == options["processing_class"].eos_token_id
    assert streamed == plain


def test_a_method_of_a_step_may_not_be_overridden():
    """By a class, on whichever side, by whoever changes the library's, or by a newer version."""
    for plain in TRAINERS:
        for name in heeded.decisive_methods(plain):
            own = type("Own", (plain,), {name: lambda *_: None})
            for kind in (mixed(own), type("Last", (mixed(plain),), {name: 0})):
                with pytest.raises(InputError, match=rf"cannot heed \w+\.{name}: \w"):
                    heeded.check_class(kind, StreamedTrainer)
        for name in heeded.NAMES["methods"]["heeded"]:
            heeded.check_class(mixed(type("Own", (plain,), {name: None})), StreamedTrainer)
    with pytest.raises(InputError, match="cannot heed KTOTrainer: take Trainer"):
        heeded.check_class(mixed(trl.KTOTrainer), StreamedTrainer)
    newer = type("Trainer", (Trainer,), {"__module__": "transformers.trainer", "_new": 1})
    heeded.check_class(mixed(newer), StreamedTrainer)
    with pytest.raises(InputError, match=r"Own\._new: this version of MegaTrain does not know it"):
        heeded.check_class(mixed(type("Own", (newer,), {"_new": str})), StreamedTrainer)


@dataclass
class NewerArguments(TrainingArguments):
    """Those of a version that has one more; and a user's, who has one, too."""

    __module__ = "transformers.training_args"
    newer: bool = False


@dataclass
class OwnArguments(NewerArguments):
    own: bool = False


def test_an_argument_that_is_not_heeded_is_refused_by_name(tmp_path):
    args = OwnArguments(str(tmp_path), use_cpu=True, own=True)
    heeded.check_arguments(args)
    args.newer = True
    with pytest.raises(InputError, match=r"args\.newer: this version of MegaTrain does not know"):
        heeded.check_arguments(args)
    for config in TRAINERS.values():
        made = config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        for name in heeded.REFUSED["arguments"].keys() & {field.name for field in fields(config)}:
            changed = copy.copy(made)
            setattr(changed, name, 0.7)
            with pytest.raises(InputError, match=rf"cannot heed args\.{name}: \w"):
                heeded.check_arguments(changed)


def set_args(name, value):
    return lambda made: setattr(made.args, name, value)


def set_own(name, value):
    return lambda made: setattr(made, name, value)


CHANGES = {
    "args.learning_rate": set_args("learning_rate", 3e-3),
    "args.weight_decay": set_args("weight_decay", 3.0),
    "args.max_grad_norm": set_args("max_grad_norm", 0.05),
    "args.max_steps": set_args("max_steps", 2),
    "args.bf16, changed": set_args("bf16", True),
    "args.label_smoothing_factor, changed": set_args("label_smoothing_factor", 0.1),
    "max_grad_norm is 0.7, and cannot become None": set_args("max_grad_norm", 0.0),
    "model_accepts_loss_kwargs": set_own("model_accepts_loss_kwargs", False),
    "compute_loss, changed": set_own("compute_loss", lambda *_, **__: 0),
    "neftune_noise_alpha, changed": set_own("neftune_noise_alpha", 5.0),
    "label_smoother, changed": set_own("label_smoother", str),
    "engine_options, changed": set_own("engine_options", {"device_memory": "1GiB"}),
    "trainer.optimizer": set_own("optimizer", torch.optim.SGD([torch.zeros(1)], lr=1.0)),
    "model, changed": set_own("model", small()),
    "log": lambda made: setattr(made, "log", lambda logs, *_: made.state.log_history.append(logs)),
    "accelerator.backward, replaced": lambda made: setattr(made.accelerator, "backward", print),
    "accelerator.gradient_accumulation_steps, changed": lambda made: setattr(
        made.accelerator, "gradient_accumulation_steps", 7
    ),
    "model.config.output_router_logits, changed": lambda made: setattr(
        made.model.config, "output_router_logits", True
    ),
}


@pytest.mark.parametrize("name", few([*CHANGES], *range(0, len(CHANGES), 3)))
def test_what_changes_after_a_trainer_is_made_is_heeded_or_refused(name, tmp_path):
    def make(kind):
        made = trainer(kind, tmp_path, **SHORT | {"weight_decay": 0.1})
        CHANGES[name](made)
        return made

    if any(word in name for word in (",", "trainer.")):
        changed = make(Streamed)
        with pytest.raises(InputError, match=name):
            changed.train()
    else:
        alike(make)


def at(event, change, step=2):
    def call(self, args, state, control, **given):
        if state.global_step == step:
            change(args=args, control=control, **given)

    return type("At", (TrainerCallback,), {event: call})()


def set_groups(**settings):
    def change(optimizer, **_):
        for group in optimizer.param_groups:
            group.update(settings)

    return change


def stop(control, **_):
    control.should_training_stop = True


HEEDED_CALLBACKS = {
    "rates before the update": ("on_pre_optimizer_step", set_groups(lr=2e-3)),
    "betas before the update": ("on_pre_optimizer_step", set_groups(betas=(0.3, 0.4))),
    "eps": ("on_step_end", set_groups(eps=0.1)),
    "weight decay": ("on_step_begin", set_groups(weight_decay=3.0)),
    "clipping": ("on_step_begin", lambda args, **_: setattr(args, "max_grad_norm", 0.02)),
    "a stop in a step": ("on_substep_end", stop),
    "a stop before the update": ("on_pre_optimizer_step", stop),
    "evaluation mode": ("on_step_begin", lambda model, **_: model.eval()),
}


@pytest.mark.parametrize("name", few([*HEEDED_CALLBACKS], 0, 6))
def test_what_a_callback_changes_is_heeded(name, tmp_path, base):
    options = {"callbacks": [at(*HEEDED_CALLBACKS[name])]}
    plain, _ = alike(lambda kind: trainer(kind, tmp_path, options=copy.deepcopy(options), **SHORT))
    assert lines(plain) != base or name == "evaluation mode"


RESUMED: dict[str, dict[str, Any]] = {
    "ignore_data_skip": {"ignore_data_skip": True},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "no max_grad_norm": {"max_grad_norm": 0.0},
    "restore_callback_states_from_checkpoint": {"restore_callback_states_from_checkpoint": True},
    "save_total_limit": {"save_total_limit": 1},
}


def leave(control, **given):
    set_groups(betas=(0.3, 0.4), weight_decay=3.0)(**given)
    control.should_save = control.should_training_stop = True


def resumed(kind, folder, changes):
    """A trainer that has gone on, changed, from what a callback left; and its folders."""
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    for resume, more in ((False, {}), (True, changes)):
        patience = EarlyStoppingCallback(2, early_stopping_threshold=9.0)
        callbacks = [patience, *([] if resume else [at("on_step_end", leave)])]
        settings = SHORT | SAVES | best | more
        made = trainer(kind, folder, options={"callbacks": callbacks}, **settings)
        made.train(resume_from_checkpoint=resume)
    return made, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", quick(RESUMED, ("ignore_data_skip",)))
def test_an_argument_is_heeded_on_resume(name, tmp_path):
    """Rows that were seen are not passed over, patience goes on, or a folder goes.

    What a callback has set before is still set.
    """
    plain, wanted = resumed(Trainer, tmp_path / "plain", RESUMED[name])
    streamed, got = resumed(Streamed, tmp_path / "streamed", RESUMED[name])
    same(plain, streamed)
    assert got == wanted
    otherwise, folders = resumed(Trainer, tmp_path / "otherwise", {})
    assert (lines(plain), wanted) != (lines(otherwise), folders)


def test_a_schedule_of_ones_own_goes_on_after_a_resume(tmp_path):
    """The checkpoint's engine has another optimizer than that for which the schedule was made."""

    def resumed_with(kind):
        for resume in (False, True):
            steps = {"max_steps": 4 if resume else 2, "save_strategy": "steps", "save_steps": 2}
            made = trainer(kind, tmp_path / kind.__name__, **SHORT | steps)
            made.lr_scheduler = StepLR(made.create_optimizer(), 1, 0.3)
            made.train(resume_from_checkpoint=resume)
        return made

    same(*map(resumed_with, (Trainer, Streamed)))


def test_the_models_save_takes_what_transformers_takes_or_refuses_it_by_name(tmp_path):
    model = trainer(Streamed, tmp_path).model
    usual = {"is_main_process": True, "save_function": torch.save, "state_dict": None}
    model.save_pretrained(tmp_path / "saved", safe_serialization=True, **usual)
    assert (tmp_path / "saved/model.safetensors").exists()
    with pytest.raises(InputError, match="cannot heed save_pretrained's max_shard_size: leave it"):
        model.save_pretrained(tmp_path / "again", max_shard_size="1GB")
    assert not (tmp_path / "again").exists()


def test_accelerate_unwraps_the_model_to_the_stand_in(tmp_path):
    made = trainer(Streamed, tmp_path, **SHORT)
    unwrapped = made.accelerator.unwrap_model(made.model, keep_fp32_wrapper=False)
    unwrapped.save_pretrained(tmp_path)
    assert unwrapped is made.model and (tmp_path / "model.safetensors").exists()


def params(optimizer):
    return optimizer.param_groups[0]["params"][0]


def test_the_model_given_is_the_trainer_s_from_then_on(tmp_path):
    """As under a plain Trainer: it saves what was learnt, and nothing else of it goes unheeded."""

    def saved(kind):
        model = small()
        made = trainer(kind, tmp_path / kind.__name__, model=model, **SHORT)
        if kind is Streamed:
            for change in (
                lambda: model.requires_grad_(False),
                lambda: model.model.layers[0].requires_grad_(False),
                lambda: setattr(model, "loss_function", print),
                lambda: copy.deepcopy(model),
                lambda: torch.save(model, tmp_path / "model.pt"),
            ):
                with pytest.raises(InputError, match="of a StreamedTrainer"):
                    change()
        made.train()
        model.save_pretrained(tmp_path / kind.__name__ / "model")
        if kind is Streamed:
            with pytest.raises(InputError, match="the model of another StreamedTrainer"):
                trainer(Streamed, tmp_path, model=model, **SHORT)
        return load_file(tmp_path / kind.__name__ / "model" / "model.safetensors")

    wanted, got = saved(Trainer), saved(Streamed)
    for name, values in wanted.items():
        torch.testing.assert_close(got[name], values, rtol=1e-5, atol=1e-6)


def test_a_peft_model_given_is_saved_as_an_adapter_and_its_base_is_gone(tmp_path):
    base = small()
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    trainer(Streamed, tmp_path, model=model, **SHORT).train()
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    with pytest.raises(InputError, match="parameters of a StreamedTrainer's model"):
        base.named_parameters()


REFUSED_CALLBACKS: dict[str, Callable[..., Any]] = {
    "parameters": lambda model, **_: [p.mul_(0.9) for p in model.parameters()],
    "gradients": lambda model, **_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "frozen": lambda model, **_: setattr(next(model.parameters()), "requires_grad", False),
    "modules": lambda model, **_: [m for m in model.modules() if hasattr(m, "p")],
    "a layer": lambda model, **_: model.model.layers[0],
    "state": lambda model, **_: model.state_dict(),
    "loading": lambda model, **_: model.load_state_dict({}),
    "a hook": lambda model, **_: model.register_forward_hook(print),
    "forward": lambda model, **_: setattr(model, "forward", print),
    "running": lambda model, **_: model(input_ids=torch.zeros(1, 2, dtype=torch.int64)),
    "replies": lambda model, **_: model.generate(torch.zeros(1, 2, dtype=torch.int64)),
    "zero_grad of the optimizer": lambda optimizer, **_: optimizer.zero_grad(),
    "clearing moments": lambda optimizer, **_: optimizer.state.clear(),
    "new moments": lambda optimizer, **_: setattr(optimizer, "state", {}),
    "a gradient of a group": lambda optimizer, **_: params(optimizer).grad,
    "weights of a group": lambda optimizer, **_: params(optimizer).data.mul_(0.5),
    "freezing a group": lambda optimizer, **_: params(optimizer).requires_grad_(False),
    "amsgrad": set_groups(amsgrad=True),
    "a parameter less": lambda optimizer, **_: optimizer.param_groups[0]["params"].pop(),
    "a configuration": lambda model, **_: setattr(model.config, "rms_norm_eps", 0.1),
}


@pytest.mark.parametrize("name", few([*REFUSED_CALLBACKS], *range(0, len(REFUSED_CALLBACKS), 5)))
def test_what_a_callback_cannot_change_is_refused(name, tmp_path):
    """At the latest at the update that would pass it over."""
    options = {"callbacks": [at("on_pre_optimizer_step", REFUSED_CALLBACKS[name], step=0)]}
    made = trainer(Streamed, tmp_path, options=options, **SHORT)
    with pytest.raises(InputError):
        made.train()
    assert made.engine.optimizer.num_steps == 0


def scored(*counts, **more):
    """The loss of micro-batches of a pair, each one of so many of its step."""
    ids = torch.full((2, 3), 7)
    pair = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
    scores = Scores(trl.RewardConfig(use_cpu=True, bf16=False), pad=0, pad_of_model=0)
    return scores.step([Waiting(pair, None, count) for count in counts], engine=None)[1]


def test_a_micro_batch_counts_by_its_own_step_of_the_trainer():
    """A stream may end within a step, whose part is then added to the next one."""
    assert scored(4, 2).shares == (1 / 4, 1 / 2)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("margin", (1, 1), r"\(1, 1\); it must be \(1,\): one number"),
        ("attention_mask", (2, 1, 3, 3), r"\(2, 1, 3, 3\); it must be"),
    ],
)
def test_pairs_of_other_shapes_than_trls_are_refused(name, shape, message):
    """TRL takes a margin [pairs, 1] from each pair's, and the mean of all differences."""
    with pytest.raises(InputError, match=f"{name} of a batch is {message}"):
        scored(1, **{name: torch.ones(shape)})


def test_autocast_around_a_trainer_is_refused(tmp_path):
    made = trainer(Streamed, tmp_path, **SHORT)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="autocast"):
        made.train()


def test_a_class_of_the_library_that_is_changed_is_seen(tmp_path, monkeypatch):
    made = trainer(Streamed, tmp_path, **SHORT)
    monkeypatch.setattr(Trainer, "compute_loss", lambda *_, **__: 0)
    with pytest.raises(InputError, match=r"Trainer\.compute_loss"):
        made.train()
