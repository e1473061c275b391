"""Keys of other trainers, and what does the same here (docs/coming-from.md has the tables)."""

_PLACES = {
    # Hugging Face's TrainingArguments and TRL
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
    "dataset_config": "data.hub_config",
    "dataset_train_split": "data.hub_split",
    "dataset_text_field": "data.text_field",
    "chat_template_path": "model.chat_template",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "per_device_train_batch_size": "training.micro_batch_size",
    "num_train_epochs": "training.epochs",
    "max_steps": "training.steps",
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler_kwargs": "schedule.options",
    "metric_for_best_model": "checkpoint.best",
    "greater_is_better": "checkpoint.mode",
    "load_best_model_at_end": "checkpoint.load_best",
    "early_stopping_patience": "training.early_stopping",
    "early_stopping_threshold": "training.early_stopping",
    "early_stopping_steps": "training.early_stopping",
    "label_smoothing_factor": "loss.label_smoothing",
    "eval_steps": "training.eval_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "output.log_every",
    "output_dir": "output.folder",
    "report_to": "tracking.to",
    "trackio_space_id": "tracking.options",
    # LLaMA-Factory
    "cutoff_len": "data.sequence_length",
    "dataset": "data.path",
    "interleave_probs": "data.weights",
    "flash_attn": "model.attn_implementation",
    "val_size": "data.eval_fraction",
    # axolotl
    "base_model": "model.path",
    "datasets": "data.path",
    "sequence_len": "data.sequence_length",
    "sample_packing": "data.packing",
    "val_set_size": "data.eval_fraction",
    "num_epochs": "training.epochs",
    "wandb_project": "tracking.project",
    "wandb_name": "tracking.run_name",
    "lr_scheduler": "schedule.name",
    # DeepSpeed
    "train_batch_size": "training.batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_clipping": "training.max_grad_norm",
}

_REASONS = {
    "gradient_accumulation_steps": "training.batch_size counts the rows of a whole optimizer step",
    "bf16": "write engine.precision: bf16",
    "fp16": "there is no fp16; engine.precision is bf16 or fp32",
    "gradient_checkpointing": "the engine chooses itself what it computes again",
    "assistant_only_loss": "of conversations only the replies are learnt",
    "completion_only_loss": "of prompts and completions only the completions are learnt",
    "template": "the model's own chat template is used, or that in model.chat_template",
    "resume_from_checkpoint": "resume with `megatrain train RUN.yaml --resume`",
    "logging_dir": "trackers write into the run's folder (output.folder), below tracking/",
    "deepspeed": "nothing of it is needed: state rests in host memory",
    "fsdp": "nothing of it is needed: state rests in host memory",
}


def foreign(name: str) -> str | None:
    """What to write here instead of a key that another trainer has; None: nobody has it."""
    if name in _PLACES:
        return f"its name here is {_PLACES[name]}"
    if name.startswith("lora_"):
        return "all parameters are trained; there are no adapters yet"
    return _REASONS.get(name)
