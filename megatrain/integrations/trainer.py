"""Hugging Face's Trainer, or TRL's, with an engine: `class T(StreamedTrainer, SFTTrainer)`.

The Trainer's loop, callbacks, loggers, schedulers and evaluations stay. The engine computes all
micro-batches of an optimizer step together, in one layer-major step, updates weights, and saves.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.api import Engine, StepResult
from megatrain.base.changed import changed
from megatrain.compat.peft import KEYS, is_peft_model, without_wrapper
from megatrain.compat.transformers import flatten_dict, num_items
from megatrain.errors import InputError
from megatrain.integrations import heeded, objectives, trainer_model
from megatrain.integrations.heeded import REFUSED, refuse
from megatrain.model.adapters import adapted
from megatrain.model.rebuilt import read_by_forward
from megatrain.model.routers import set_router_losses
from megatrain.model.sizes import most_tokens
from megatrain.optim import AdamW

_NOT_MEASURED = ("mean_token_accuracy", "entropy", "num_tokens", "logits/chosen", "logits/rejected")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_PATCHES = {"forward", "model_tags", "gradient_checkpointing_enable"}
_PATCHES |= {"activation_checkpointing_enable"}  # attributes that TRL sets on a model
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_ENGINES_OWN = {"use_cache": False, "logits_to_keep": 0, "return_dict": True}
_ENGINES_OWN |= {"output_attentions": False, "output_hidden_states": False}  # as of a forward
_SAVED = {"is_main_process": True, "save_function": torch.save, "safe_serialization": True}
_SAVED |= {"push_to_hub": False}  # options of save_pretrained with which the engine saves
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # as the tokenizer has them
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_OPTIONS = ("compute_loss_func", "model_init", "optimizer_cls_and_kwargs")
_NO_LOGITS = "there are no logits for pairs; their metrics are logged"
_NOT_BEST = "the engine does not measure it; take eval_loss"
_LIMITS = ("device_memory", "host_memory")
_WHOLE = "load_best_model_at_end takes the whole state"
_OF_THE_TRAINER = ("model", "loss", "optimizer", "seed", "router_aux_loss_coef")
_ENGINE_OPTIONS = signature(Engine).parameters.keys()
_FOLLOWS = "it follows from the Trainer's arguments"
_UNKNOWN = "megatrain.Engine has no such option"
_PEFT_MODEL = "give a PeftModel, or TRL's trainers peft_config"
_NOT_THE_BASE = (
    "DPOTrainer's reference is the model without this adapter, which begins as another model; give "
    "it as ref_model, or train get_peft_model(model, config)"
)
_ROUTERS = ("output_router_logits", "router_aux_loss_coef")
_ENGINE, _SCHEDULER = "megatrain", "scheduler.pt"
_RESUMED = (_ENGINE, _SCHEDULER, "trainer_state.json")

_Trainer: Any = object  # stands for the trainer's class


class StreamedTrainer(_Trainer):
    """Mix-in before `Trainer` or TRL's SFT-, DPO- or RewardTrainer; trains with an Engine.

    With `DPOTrainer` the reference (`ref_model`, or the given model) is streamed by a second engine
    (2 bytes a parameter in bf16).

    Attributes:
        engine: trains a copy of the given model, which becomes a stand-in without weights.
        engine_options: further arguments of `Engine`, such as placement and device_memory; with
            `args.bf16` also precision, such as fp8.
    """

    engine_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any = None, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of the trainer's class.

        Raises InputError: the engine cannot honour a setting, which is named.
        """
        self.model: Any
        self.optimizer: torch.optim.Optimizer | None
        self._waiting: list[objectives.Waiting] = []
        self._last_result: StepResult | None = None
        heeded.check_class(type(self), StreamedTrainer)
        arguments, options = heeded.by_name(super().__init__, arguments, options)
        heeded.check_options(type(self), options)
        args = options.get("args", next(iter(arguments), None))
        heeded.check_arguments(args)
        classes = {kind.__name__ for kind in type(self).__mro__}
        is_dpo, is_reward = "DPOTrainer" in classes, "RewardTrainer" in classes
        model = trainer_model.open_model(model, args, options, scores=is_reward)
        own_attributes, text = {*vars(model)}, model.config.get_text_config()
        pad_of_model = text.pad_token_id
        self._routers = {name: getattr(text, name) for name in _ROUTERS if hasattr(text, name)}
        reference, was_peft = options.pop("ref_model", None), is_peft_model(model)
        if is_dpo and args is None:
            raise InputError("StreamedTrainer needs args=DPOConfig(...)")
        if is_dpo:
            # TRL's reference has no weights: ours computes the log-probabilities.
            options["ref_model"] = without_weights = torch.nn.Module()
            vars(without_weights).update(config=model.config)
        with changed([args], model_init_kwargs=None, precompute_ref_log_probs=False):
            super().__init__(model, *arguments, **options)
        self._is_trl = hasattr(self, "_metrics")
        heeded.check_arguments(self.args)
        trainers_model: Any = self.model
        # Undo TRL's patches: a forward with the head's loss in chunks (the engine's own), tags of a
        # model card, gradient checkpointing, and a padding token that would change the model.
        inner = without_wrapper(trainers_model)
        for name, patched in product(_PATCHES - own_attributes, (trainers_model, inner)):
            vars(patched).pop(name, None)
        text = trainers_model.config.get_text_config()
        kind = objectives.Preferences if is_dpo else objectives.Objective
        trl_pad = text.pad_token_id
        self._objective: objectives.Objective = (
            objectives.Scores(self.args, trl_pad, pad_of_model) if is_reward else kind(self.args)
        )
        text.pad_token_id = pad_of_model
        self._refuse()
        if getattr(self.args, "disable_dropout", False):
            trainer_model.without_dropout(trainers_model)
        if is_dpo:
            self.ref_model = None
            base_is_reference = reference is None and not was_peft and is_peft_model(trainers_model)
            adapters = trainers_model.peft_config.values() if base_is_reference else ()
            if not all(getattr(config, "init_lora_weights", True) for config in adapters):
                refuse("peft_config with init_lora_weights: False", _NOT_THE_BASE)
        decayed = set(self.get_decay_parameter_names(trainers_model))
        names = {id(value): name for name, value in inner.named_parameters()}
        undecayed = [p for name, p in trainers_model.named_parameters() if name not in decayed]
        # Names of parameters without weight decay, without PEFT's prefix.
        self._undecayed = {names[id(value)] for value in undecayed if id(value) in names}
        self._stand_in = trainer_model.ModelStandIn(trainers_model, generates=not is_reward)
        self._open_engines(trainers_model, reference)
        self._stand_in.take_the_place_of(trainers_model, inner, model)

    def _open_engines(self, model: Any, reference: Any) -> None:
        """Open the model's engine, and a reference's; if one fails, both are closed."""
        common = _engine_settings(self.args)
        with ExitStack() as opened:
            if isinstance(self._objective, objectives.Preferences):
                limits = {n: v for n, v in self.engine_options.items() if n in _LIMITS}
                self._objective.reference = opened.enter_context(
                    Engine(reference or model, **common | limits)
                )
                self._check_rows(self._objective.reference.vocab_size)
            common |= self._planned_steps() | self.engine_options
            weight = getattr(self, "router_aux_loss_coef", 0.0)
            if self._is_trl and (weight or self._routers.keys() == {*_ROUTERS}):
                # TRL's own setting, also 0, decides for a model that has both of `_ROUTERS`.
                set_router_losses(without_wrapper(model), {"router_aux_loss_coef": weight})
            engine = Engine(
                model,
                optimizer=AdamW(
                    lr=self.args.learning_rate,
                    betas=(self.args.adam_beta1, self.args.adam_beta2),
                    eps=self.args.adam_epsilon,
                    weight_decay=self.args.weight_decay,
                    no_decay=[f"^{re.escape(name)}$" for name in sorted(self._undecayed)],
                ),
                seed=self.args.seed,
                **common,
            )
            self._use_engine(opened.enter_context(engine))
            engine.require_held()
            opened.pop_all()

    def _planned_steps(self) -> dict[str, Any]:
        """The steps for which `auto` plans: their loss, and with TRL's `max_length` their sizes."""
        length = getattr(self.args, "max_length", None)
        if length is None:
            return {"loss": self._objective.loss}
        length = min(length, most_tokens(self.model.config) or length)
        rows = getattr(self._objective.loss, "lines", 1) * self.args.per_device_train_batch_size
        tokens = length * rows * self.args.gradient_accumulation_steps
        sizes = {"sequence_length": length, "micro_batch": rows, "tokens_per_step": tokens}
        return {"loss": self._objective.loss} | sizes

    def _check_rows(self, rows: int) -> None:
        """Raises InputError: the reference's embedding table lacks tokens of the data."""
        of_text: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        largest = max(of_text.get_vocab().values(), default=0)
        needed = min(self.model.config.get_text_config().vocab_size, largest + 1)
        if rows < needed:
            refuse(
                f"ref_model, whose embedding table has {rows} rows",
                f"the tokenizer's tokens need {needed}; call resize_token_embeddings({needed}) of "
                "it, or take another",
            )

    def _use_engine(self, engine: Engine) -> None:
        assert engine.optimizer is not None
        self.engine = engine
        self._stand_in.open(engine, self._export, self._refuse_zero_grad)
        engine.optimizer.drive(self._update, self._refuse_zero_grad)
        self.model, self.model_wrapped = self._stand_in, trainer_model.Wrapped(self._stand_in)
        self._settings_when_made = heeded.decisive(self)

    def _refuse(self) -> None:
        """Raises InputError: settings of the made trainer that the engine cannot honour."""
        args = self.args
        optimizers = self.optimizer is not None or self.lr_scheduler is not None
        accelerate, precision = self.accelerator.mixed_precision, "bf16" if args.bf16 else "no"
        reserved = {*_OF_THE_TRAINER, *_engine_settings(args)} & self.engine_options.keys()
        unknown = self.engine_options.keys() - _ENGINE_OPTIONS
        if args.bf16 and self.engine_options.get("precision") == "fp8":
            reserved.discard("precision")
        unmeasured = (args.metric_for_best_model or "").endswith(_NOT_MEASURED)
        pairs = type(self._objective) is not objectives.Objective
        for wrong, name, reason in (
            (args.optim not in _OPTIMIZERS, "args.optim", f"it must be {' or '.join(_OPTIMIZERS)}"),
            (optimizers, "optimizers", REFUSED["options"]["optimizers"]),
            *((getattr(self, n) is not None, n, REFUSED["options"][n]) for n in _OPTIONS),
            (pairs and self.compute_metrics is not None, "compute_metrics", _NO_LOGITS),
            (unmeasured and self.compute_metrics is None, "args.metric_for_best_model", _NOT_BEST),
            (args.save_only_model and args.load_best_model_at_end, "args.save_only_model", _WHOLE),
            *((True, f"engine_options[{n!r}]", _FOLLOWS) for n in sorted(reserved)),
            *((True, f"engine_options[{n!r}]", _UNKNOWN) for n in sorted(unknown)),
            ("adapter" in self.engine_options, "engine_options['adapter']", _PEFT_MODEL),
            (args.world_size > 1, "several processes", "use Engine(group=...)"),
            (args.n_gpu > 1, f"{args.n_gpu} GPUs", "show the process one: CUDA_VISIBLE_DEVICES=0"),
            (accelerate != precision, f"mixed precision {accelerate!r}", "set args.bf16"),
        ):
            if wrong:
                refuse(name, reason)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: the engine copies it to host memory."""

    def _wrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return self.model_wrapped

    def _clip_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        """A tensor that gets the gradient norm when the step is taken."""
        self._norm = torch.zeros((), dtype=torch.float64)
        return self._norm

    _get_grad_norm = _clip_grad_norm

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The engine's optimizer, with the settings that the arguments have now."""
        streamed = self.engine.optimizer
        assert streamed is not None
        if self.optimizer is None:
            args, self.optimizer = self.args, streamed
            for group in streamed.param_groups:
                group.update(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2))
                undecayed = self._undecayed.issuperset(group["param_names"])
                decay = 0.0 if undecayed else args.weight_decay
                group.update(eps=args.adam_epsilon, weight_decay=decay)
        if getattr(self.optimizer, "optimizer", self.optimizer) is not streamed:
            refuse("trainer.optimizer", "the engine updates; set args.optim and what goes with it")
        return self.optimizer

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as the base class does, without micro-batches that an interrupt left behind."""
        self._waiting.clear()
        heeded.check_unchanged(self, StreamedTrainer, self._settings_when_made)
        return super().train(*arguments, **options)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep the micro-batch for the optimizer's step; the loss of 0 is replaced then."""
        model.train()
        items = None if num_items_in_batch is None else float(num_items_in_batch)
        count = self.current_gradient_accumulation_steps
        self._waiting.append(objectives.Waiting(_for_engine(inputs), items, count))
        return torch.zeros((), device=self.args.device)

    def _update(self) -> None:
        """Take a step of the waiting micro-batches: the Trainer's loop calls this to update."""
        heeded.check_unchanged(self, StreamedTrainer, self._settings_when_made)
        self.create_optimizer()
        self.engine.max_grad_norm = self.args.max_grad_norm or None
        rows, loss = self._objective.step(self._waiting, self.engine)
        shares = self._router_shares(self._waiting)
        self._last_result = self.engine.step(rows, loss, router_shares=shares)
        self._norm.fill_(self._last_result.grad_norm)
        self._add_to_logs(self._last_result.loss, self._last_result.measures)

    def _add_to_logs(self, loss: float, measures: Mapping[str, float]) -> None:
        """Add the loss and measures of the waiting micro-batches to the Trainer's logs."""
        for _ in self._waiting:  # TRL's trainers log the mean over micro-batches
            self._add_measures("train", measures)
        self._waiting.clear()
        self._tr_loss += loss

    def _refuse_zero_grad(self) -> None:
        """Raises InputError: `zero_grad` would drop micro-batches that wait for their step."""
        if self._waiting:
            refuse("zero_grad within a step", "the engine takes a step as a whole; leave it out")

    def _finalize_training(self, *arguments: Any) -> Any:
        """Add the loss of a last, incomplete step to the logs; then as the base class."""
        if self._waiting:
            self._add_to_logs(*self._loss_of(self._waiting))
        return super()._finalize_training(*arguments)

    def _loss_of(self, waiting: list[objectives.Waiting]) -> tuple[float, dict[str, float]]:
        """The loss of micro-batches, the routers' included, without an update; and its measures."""
        rows, loss = self._objective.step(waiting, self.engine)
        value, measures = self._objective.value(rows, loss, self.engine)
        if self.engine.balances_experts:
            bare, shares = loss.bare(rows), self._router_shares(waiting)
            weighed, balance = self.engine.router_loss(bare, shares)
            value, measures["aux_loss"] = value + weighed, balance
        return value, measures

    def _router_shares(self, waiting: list[objectives.Waiting]) -> list[float] | None:
        """The weight of each micro-batch's routers' loss: with TRL, the mean over them."""
        if not self.engine.balances_experts:
            return None
        return [1 / m.num_micro if self._is_trl or m.items is None else 1.0 for m in waiting]

    def _add_measures(self, mode: str, measures: Mapping[str, float]) -> None:
        """Add measures for TRL's trainers, whose next log has their means."""
        if self._is_trl:
            for name, value in measures.items():
                self._metrics[mode][name].append(value)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        heeded.check_unchanged(self, StreamedTrainer, self._settings_when_made)
        if self.optimizer is None:  # Trainer reports this if no run has prepared the model
            self.model_preparation_time = 0.0
        return super().evaluation_loop(dataloader, *arguments, **options)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch, and unless `prediction_loss_only` its logits and labels."""
        rows = _for_engine(inputs)
        is_cross_entropy = type(self._objective) is objectives.Objective
        if prediction_loss_only:
            has_loss = "labels" in rows or not is_cross_entropy
            return self._evaluated(rows) if has_loss else None, None, None
        if not is_cross_entropy:
            raise InputError("there are no predictions for pairs; use megatrain.Engine.logits")
        extra_outputs = [name for name in _OUTPUTS if getattr(self.engine.config, name, False)]
        if not self._is_trl and (extra_outputs or "logits" in (ignore_keys or ())):
            refuse(", ".join(extra_outputs) or "ignore_keys", "predictions are logits alone")
        loss, logits, labels = objectives.predicted(self.engine, rows, self._num_items(rows))
        if loss is not None and (self.engine.balances_experts or loss.isnan()):  # no label: NaN
            loss = self._evaluated(rows)
        return loss, logits, labels

    def _evaluated(self, rows: dict[str, Tensor]) -> Tensor:
        """The loss of a batch; its measures are added to the evaluation's."""
        value, measures = self._loss_of([objectives.Waiting(rows, self._num_items(rows), 1)])
        self._add_measures("eval", measures)
        return torch.tensor(value)

    def _num_items(self, rows: dict[str, Tensor]) -> float | None:
        """The divisor of an evaluation's loss, as in the Trainer; None: TRL takes the mean."""
        return None if self._is_trl else num_items(self, rows)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log, with the measures of the last step."""
        if "grad_norm" in logs and self._last_result is not None:
            logs.update(self._last_result.measures)
        super().log(logs, *arguments, **options)

    def _export(self, folder: str | Path, **options: Any) -> None:
        """Save as the engine does, with the routers' settings as given and aligned token ids."""
        for name in options.keys() - signature(self.engine.save_pretrained).parameters.keys():
            if options.pop(name) != _SAVED.get(name):
                refuse(f"save_pretrained's {name}", "leave it out")
        text = self.model.config.get_text_config()
        ids = {name: getattr(text, name) for name in _TOKEN_IDS if hasattr(text, name)}
        with changed([self.engine.config.get_text_config()], **self._routers, **ids):
            self.engine.save_pretrained(folder, **options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        self._export(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.lr_scheduler is not None
        self.engine.save(Path(output_dir) / _ENGINE)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        present, checkpoint = self._model_facts(), Path(resume_from_checkpoint)
        for name in _RESUMED:
            if not (checkpoint / name).exists():
                refuse(
                    f"{resume_from_checkpoint}, which has no {name}",
                    "take a checkpoint that a StreamedTrainer has saved whole, without "
                    "save_only_model",
                )
        self._restore(checkpoint / _ENGINE)
        saved = self._model_facts()
        for name in saved | present:
            if present.get(name) != saved.get(name):
                refuse(
                    f"{resume_from_checkpoint}, whose model has another {name}",
                    "make the trainer with the model, adapter and frozen parameters of the "
                    "checkpoint",
                )

    def _model_facts(self) -> dict[str, Any]:
        """Everything but the weights that decides what the model computes and learns, by name."""
        optimizer, source = self.engine.optimizer, self.engine._opened.source
        assert optimizer is not None
        adapter = adapted(source.model)
        keys = {} if adapter is None else adapter.as_json()["configs"][adapter.name]
        return {
            "base": source.base,
            "number of parameters": self.engine.num_parameters,
            "set of trained or decayed parameters": optimizer.group_of(),
            **{key: keys[key] for key in keys.keys() & KEYS - {"init_lora_weights"}},
            **flatten_dict(read_by_forward(self.engine.config)),
        }

    def _restore(self, folder: Path) -> None:
        """Replace the trainer's engine by that of a checkpoint."""
        accepted = signature(Engine.load).parameters
        options = {name: v for name, v in self.engine_options.items() if name in accepted}
        former = self.engine.optimizer
        self.engine.close()
        options = _engine_settings(self.args) | self._planned_steps() | options
        self._use_engine(Engine.load(folder, **options))
        assert self.engine.optimizer is not None and former is not None
        self._groups = self.engine.optimizer.state_dict()
        # A schedule that the user made before sets rates in the former list: it stays in use.
        former.param_groups[:] = self.engine.optimizer.param_groups
        self.engine.optimizer.param_groups = former.param_groups
        self.optimizer = None  # `create_optimizer` sets the new engine's

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._restore(Path(self.state.best_model_checkpoint) / _ENGINE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.lr_scheduler is not None and self.optimizer is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER))
        self.optimizer.load_state_dict(self._groups)  # as callbacks may have set them


def _engine_settings(args: Any) -> dict[str, Any]:
    """The options of a new or loaded engine that TrainingArguments decide."""
    return {
        "precision": "bf16" if args.bf16 else "fp32",
        "device": str(args.device),
        "max_grad_norm": args.max_grad_norm or None,
    }


def _for_engine(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A micro-batch on the CPU, without the options of a forward that the engine sets itself."""
    left_out = _LENGTHS if "position_ids" in inputs else ()
    return {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name not in left_out
        and value is not None
        and not (isinstance(value, int) and _ENGINES_OWN.get(name) == value)
    }
