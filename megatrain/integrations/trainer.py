"""The engine under Hugging Face's Trainer or TRL's: `class T(StreamedTrainer, SFTTrainer)`.

The Trainer's loop, callbacks, loggers, schedulers and evaluations stay; the engine takes the
micro-batches of an optimizer step together, in one layer-major step, updates, and saves.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatrain.api import Engine, StepResult
from megatrain.compat.peft import is_peft_model
from megatrain.errors import InputError
from megatrain.integrations.accumulation import MicroBatchMeans, Waiting, shares, weighed
from megatrain.integrations.opening import as_loaded, opened, without_dropout
from megatrain.integrations.pairs import (
    PLAIN,
    PREFERENCES,
    SCORES,
    TrlReward,
    check_new_adapters,
    check_padding,
    comes_from,
    pair_loss,
    pairs,
    refuse,
    scored_pairs,
    without_reference,
)
from megatrain.integrations.predictions import Predictions, length
from megatrain.integrations.stand_in import StandIn
from megatrain.loss import CROSS_ENTROPY, JointLoss, Loss, Reward
from megatrain.optim import AdamW
from megatrain.units import parse_bytes

_OWN = ("transformers.trainer", "trl.trainer.sft_trainer")
_KNOWN = (*_OWN, PREFERENCES, SCORES)  # whose losses are known
_LOSSES = ("nll", "chunked_nll")  # of TRL, mathematically one
_OFF = {
    "deepspeed": "host memory holds the state already",
    "fsdp": "host memory holds the state already",
    "fp16": "take bf16, or neither for fp32",
    "torch_compile": "the engine compiles its layers itself",
    "use_liger_kernel": "the head's loss is taken in chunks already",
    "label_smoothing_factor": "use a run file: loss.label_smoothing",
    "neftune_noise_alpha": "use a run file: training.neftune_alpha",
    "auto_find_batch_size": "the engine plans its memory",
}
_NOT_MEASURED = ("mean_token_accuracy", "entropy", "num_tokens", "logits/chosen", "logits/rejected")
_OTHER_LOSS = "the engine's loss here is cross entropy; others: docs/losses.md"
_NOT_CALLED = (  # of a Trainer, since the engine does all of a step
    "training_step", "prediction_step", "compute_loss_context_manager", "create_optimizer",
    "get_optimizer_cls_and_kwargs", "_prepare_inputs", "_save",
)  # fmt: skip
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_SETTINGS = {"use_cache": False, "logits_to_keep": 0, "return_dict": True}
_SETTINGS |= {"output_attentions": False, "output_hidden_states": False}
_ENGINE, _SCHEDULER = "megatrain", "scheduler.pt"

_Trainer: Any = object  # whose class this one is mixed into


class StreamedTrainer(_Trainer):
    """Mixed in before `Trainer` or TRL's SFT-, DPO- or RewardTrainer; trains with an Engine.

    With `DPOTrainer` the reference, `ref_model` or the model as it is given, is streamed by an
    engine of its own (2 bytes a parameter in bf16).

    Attributes:
        engine: whose masters are trained. The model given is copied: drop it.
        engine_options: further arguments of `Engine`, such as placement and device_memory.
    """

    engine_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any = None, *arguments: Any, **options: Any) -> None:
        """As of the class it is mixed into.

        Raises:
            InputError: a setting that the engine cannot heed, by its name; or a model that cannot
                be streamed.
        """
        paired, scores = (comes_from(type(self), module) for module in (PREFERENCES, SCORES))
        self.model: Any
        self.optimizer: torch.optim.Optimizer | None
        self._waiting: list[Waiting] = []
        self._last: StepResult | None = None
        self._loss: Loss = CROSS_ENTROPY
        _refuse_class(type(self))
        args = options.get("args", next(iter(arguments), None))
        model = opened(model, args, options, scores=scores)
        before, pad = set(vars(model)), model.config.get_text_config().pad_token_id
        reference, wrapped = options.pop("ref_model", None), is_peft_model(model)
        with without_reference(options.get("args"), paired), as_loaded(args):
            super().__init__(model, *arguments, **options)
        if paired:
            self._loss = pair_loss(self.args)
            self.precompute_ref_logps = False
        if scores:
            self._loss = TrlReward(self.args.center_rewards_coefficient)
        self._refuse()
        given: Any = self.model
        if getattr(self.args, "disable_dropout", False):
            without_dropout(given)
        if paired and reference is None and not wrapped and is_peft_model(given):
            check_new_adapters(given)
        # Of TRL: a forward that takes the head's loss in chunks, as the engine does; a card's tags;
        # and a token for padding that another model would be built with.
        inner = given.get_base_model() if is_peft_model(given) else given
        for name, changed in product({"forward", "model_tags"} - before, (given, inner)):
            vars(changed).pop(name, None)
        text = given.config.get_text_config()
        if scores:
            check_padding(pad, text.pad_token_id)
        self._pad, text.pad_token_id = text.pad_token_id, pad
        decayed = set(self.get_decay_parameter_names(given))
        own = {id(value): name for name, value in inner.named_parameters()}
        kept = [value for name, value in given.named_parameters() if name not in decayed]
        names = [own[id(value)] for value in kept if id(value) in own]  # without PEFT's prefix
        self._columns = signature(inner.forward)
        reference = (reference or given) if paired else None
        self._open_engines(given, reference, [f"^{re.escape(name)}$" for name in names])

    def _open_engines(self, given: Any, reference: Any, no_decay: list[str]) -> None:
        """That of the model, and that of a reference; where one fails, no other stays open."""
        how = _settings(self.args)
        with ExitStack() as held:
            self._reference = None
            if reference is not None:
                self._reference = held.enter_context(Engine(reference, **how))
            engine = Engine(
                given,
                loss=self._loss,
                optimizer=_optimizer(self.args, no_decay),
                **how,
                seed=self.args.seed,
                **self.engine_options,
            )
            self._take(held.enter_context(engine))
            engine.require_held()
            held.pop_all()

    def _precompute_ref_logps(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """DPOTrainer calls this where it is made; the reference's engine is asked in each step."""
        return dataset

    def _take(self, engine: Engine) -> None:
        self.engine = engine
        self.model = self.model_wrapped = StandIn(
            engine, self._columns, generates=not isinstance(self._loss, Reward)
        )

    def _refuse(self) -> None:
        """Raises InputError: a setting asks for what would not be done."""
        args = self.args
        wrong = {f"args.{name}": why for name, why in _OFF.items() if getattr(args, name, None)}
        if self.compute_loss_func is not None:
            wrong["compute_loss_func"] = _OTHER_LOSS
        if self._loss is CROSS_ENTROPY and getattr(args, "loss_type", "nll") not in _LOSSES:
            wrong["args.loss_type"] = _OTHER_LOSS
        if args.optim not in ("adamw_torch", "adamw_torch_fused"):
            wrong["args.optim"] = "it must be adamw_torch or adamw_torch_fused"
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            wrong["optimizers"] = "the engine updates; leave the optimizer out"
        if self.compute_metrics is not None and self._loss is not CROSS_ENTROPY:
            wrong["compute_metrics"] = "of pairs there are no logits; what they measure is logged"
        if (args.metric_for_best_model or "").removeprefix("eval_") in _NOT_MEASURED:
            wrong["args.metric_for_best_model"] = "the engine does not measure it; take eval_loss"
        if args.save_only_model and args.load_best_model_at_end:
            wrong["args.save_only_model"] = "load_best_model_at_end takes the whole state"
        if self.model_init is not None:
            wrong["model_init"] = "give the model"
        for name in ("loss", "optimizer", "seed", *_settings(args)):
            if name in self.engine_options:
                wrong[f"engine_options[{name!r}]"] = "it follows from the Trainer's arguments"
        if args.world_size > 1:
            wrong["several processes"] = "use Engine(group=...)"
        refuse(wrong)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: the engine copies it to host memory."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Groups for schedulers and callbacks, whose settings each step gives to the engine."""
        if self.optimizer is None:
            streamed = self.engine.optimizer
            assert streamed is not None
            groups = [dict(group) for group in streamed.param_groups]
            # Without gradients it does nothing; schedules read the rate that it was made with.
            self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)
        return self.optimizer

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As of the class it is mixed into; nothing is left of a step that was broken off."""
        self._waiting = []
        return super().train(*arguments, **options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep the micro-batch; with the last of a step take the step. Returns its loss, or 0."""
        model.train()
        items = None if num_items_in_batch is None else float(num_items_in_batch)
        count = self.current_gradient_accumulation_steps
        self._waiting.append(Waiting(_on_host(inputs), items, count))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        streamed = self.engine.optimizer
        assert streamed is not None and self.optimizer is not None
        pairs = zip(streamed.param_groups, self.optimizer.param_groups, strict=True)
        for group, scheduled in pairs:
            group.update({name: scheduled[name] for name in group if name != "params"})
        waiting, self._waiting = self._waiting, []
        self._last = self.engine.step(*self._step_of(waiting))
        for _ in waiting:  # trainers of TRL log the mean over micro-batches
            self._measured("train", self._last.measures)
        return torch.tensor(self._last.loss, device=self.args.device)

    def _step_of(self, waiting: list[Waiting]) -> tuple[list[dict[str, Tensor]], Loss]:
        """Micro-batches and loss of a step, each micro-batch counting as the Trainer counts it."""
        if not isinstance(self._loss, MicroBatchMeans):
            return weighed(waiting, self.engine.label_shift)
        step = self._rows([micro.inputs for micro in waiting])
        return step, replace(self._loss_of(step), shares=shares(waiting))

    def _rows(self, step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Micro-batches as the loss takes them; of pairs with what it asks for."""
        if isinstance(self._loss, Reward):
            return scored_pairs(step, self._pad)
        if self._reference is None:
            return step
        made = pairs(step)
        found = self._reference.logprobs([{name: micro[name] for name in PLAIN} for micro in made])
        return [m | {"reference_logp": own} for m, own in zip(made, found, strict=True)]

    def _loss_of(self, step: list[dict[str, Tensor]]) -> Any:
        """Rewards have margins where the data do."""
        if not isinstance(self._loss, Reward):
            return self._loss
        return replace(self._loss, margin="margin" in step[0])

    def _measured(self, mode: str, measures: Mapping[str, float]) -> None:
        """What a trainer of TRL logs with the next line: its means since the last one."""
        if hasattr(self, "_metrics"):
            for name, value in measures.items():
                self._metrics[mode][name].append(value)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """As of the class it is mixed into; host memory for logits is looked after."""
        keeps = self.preprocess_logits_for_metrics is None and not self.args.batch_eval_metrics
        limit = self.engine_options.get("host_memory")
        limit = None if limit is None else parse_bytes(limit)
        self._predictions = Predictions(length(dataloader), keeps, limit)
        return super().evaluation_loop(dataloader, *arguments, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch, and if more is asked for its logits and labels.

        Raises:
            InputError: logits of pairs are asked for, or more than the host has room for.
        """
        if not prediction_loss_only:
            if self._loss is not CROSS_ENTROPY:
                raise InputError("of pairs there are no predictions; use megatrain.Engine.logits")
            return self._predictions.of(self.engine, _on_host(inputs))
        rows = self._rows([_on_host(inputs)])
        loss = self._loss_of(rows)
        if not isinstance(loss, JointLoss):
            return torch.tensor(self.engine.evaluate(rows)), None, None
        plain = [{n: v for n, v in micro.items() if n not in loss.inputs} for micro in rows]
        seen = self.engine.rewards if isinstance(loss, Reward) else self.engine.logprobs
        told = loss.told(seen(plain), rows)
        value = torch.tensor(told.pop("loss"))
        self._measured("eval", told)
        return value, None, None

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log, with the last step's norm of the gradient and what its loss measured."""
        if "grad_norm" in logs and self._last is not None:
            logs.update(self._last.measures, grad_norm=self._last.grad_norm)
        super().log(logs, *arguments, **options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        self.engine.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, Path(folder) / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.lr_scheduler is not None
        self.engine.save(Path(output_dir) / _ENGINE)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        taken = signature(Engine.load).parameters
        given = {name: v for name, v in self.engine_options.items() if name in taken}
        folder = Path(resume_from_checkpoint) / _ENGINE
        self.engine.close()
        self._take(Engine.load(folder, **_settings(self.args), **given))
        self.optimizer = None

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.lr_scheduler is not None and self.optimizer is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER))
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _settings(args: Any) -> dict[str, Any]:
    """What of TrainingArguments an engine is made with, be it new or saved."""
    return {
        "precision": "bf16" if args.bf16 else "fp32",
        "device": str(args.device),
        "max_grad_norm": args.max_grad_norm or None,
    }


def _optimizer(args: Any, no_decay: list[str]) -> AdamW:
    """That of TrainingArguments."""
    return AdamW(
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        no_decay=no_decay,
    )


def _refuse_class(given: type) -> None:
    """Raises InputError: a class has a loss or a step of its own."""
    wrong = {}
    owner = next(each for each in given.__mro__ if "compute_loss" in vars(each))
    if owner.__module__ not in _KNOWN:
        wrong[f"{owner.__name__}.compute_loss"] = _OTHER_LOSS
    elif owner.__module__ == PREFERENCES and "_precompute_ref_logps" not in vars(owner):
        wrong[f"{owner.__name__} of this trl"] = "take trl 1.16, or a run file with loss.name: dpo"
    for name in ("training_step", "prediction_step", "create_optimizer", "_save"):
        if getattr(given, name) is not getattr(StreamedTrainer, name):
            wrong[name] = "the engine takes its place; mix StreamedTrainer in first"
    for name in _NOT_CALLED:
        others = (each for each in given.__mro__ if each is not StreamedTrainer)
        owner = next((each for each in others if name in vars(each)), object)
        known = owner.__module__.partition(".")[0] in ("transformers", "trl", "builtins")
        if name not in wrong and not known:
            wrong[f"{owner.__name__}.{name}"] = "the engine never calls it; leave it out"
    refuse(wrong)


def _on_host(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """A micro-batch as the engine takes it: lengths of packed rows are in the positions.

    Settings of a forward that are as the engine has them are left out; the engine refuses others.
    """
    said = _LENGTHS if "position_ids" in inputs else ()
    return {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name not in said
        and value is not None
        and not (isinstance(value, int) and _SETTINGS.get(name) == value)
    }
