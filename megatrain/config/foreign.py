"""Keys of other trainers, and what does the same here (docs/coming-from.md has the tables)."""


def _by_name(*answers: tuple[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in answers for name in names.split()}


# Hugging Face's and TRL's, LLaMA-Factory's, axolotl's, DeepSpeed's and accelerate's, Unsloth's.
_PLACES = _by_name(
    ("model.path", "model_name_or_path model_name base_model adapter_name_or_path lora_model_dir"),
    ("model.config", "train_from_scratch"),
    ("model.tokenizer", "tokenizer_name tokenizer_config tokenizer_name_or_path"),
    ("model.chat_template", "chat_template_path chat_template_jinja chat_template_jinja_file"),
    (
        "model.attn_implementation",
        "flash_attn flash_attention use_flash_attention_2 sdp_attention xformers_attention "
        "eager_attention flex_attention",
    ),
    (
        "model.train_only",
        "freeze_trainable_modules freeze_trainable_layers freeze_extra_modules unfrozen_parameters",
    ),
    ("model.router_aux_loss_coef", "output_router_logits moe_aux_loss_coef"),
    ("adapter.r", "lora_r lora_rank"),
    (
        "adapter.target_modules",
        "lora_target lora_target_modules lora_target_linear",
    ),
    ("adapter.modules_to_save", "lora_modules_to_save additional_target"),
    ("adapter.use_dora", "peft_use_dora"),
    ("adapter.use_rslora", "peft_use_rslora"),
    ("data.path", "dataset_name dataset datasets train_file dataset_path pretraining_dataset"),
    ("data.hub_config", "dataset_config dataset_config_name"),
    ("data.hub_split", "dataset_train_split"),
    ("data.text_field", "dataset_text_field"),
    ("data.eval_path", "dataset_test_split eval_dataset test_datasets validation_file"),
    ("data.eval_fraction", "val_size val_set_size"),
    ("data.streaming", "dataset_streaming"),
    ("data.shuffle_buffer", "buffer_size"),
    (
        "data.sequence_length",
        "max_length max_seq_length model_max_length block_size cutoff_len sequence_len",
    ),
    ("data.overlong", "truncation_mode excess_length_strategy"),
    ("data.packing", "neat_packing sample_packing eval_packing eval_sample_packing"),
    ("data.cache_dir", "tokenized_path dataset_prepared_path"),
    ("data.weights", "interleave_probs"),
    ("data.repeat", "mix_strategy"),
    ("data.fields", "field_messages message_property_mappings remove_unused_columns"),
    ("training.epochs", "num_train_epochs num_epochs"),
    ("training.steps", "max_steps"),
    ("training.batch_size", "train_batch_size"),
    ("training.micro_batch_size", "per_device_train_batch_size train_micro_batch_size_per_gpu"),
    ("training.max_grad_norm", "gradient_clipping"),
    ("training.eval_every", "eval_steps eval_strategy evaluation_strategy evals_per_epoch"),
    (
        "training.early_stopping",
        "early_stopping_patience early_stopping_threshold early_stopping_steps",
    ),
    ("training.samples", "generate_during_eval predict_with_generate eval_max_new_tokens"),
    ("training.neftune_alpha", "neftune_noise_alpha"),
    ("training.seed", "data_seed"),
    ("training.spike", "loss_watchdog_threshold"),
    ("optimizer.name", "optim"),
    ("optimizer.lr", "learning_rate"),
    ("optimizer.betas", "adam_beta1 adam_beta2"),
    ("optimizer.eps", "adam_epsilon"),
    ("schedule.name", "lr_scheduler_type lr_scheduler scheduler"),
    ("schedule.options", "lr_scheduler_kwargs cosine_min_lr_ratio"),
    ("loss.name", "rl"),
    ("loss.loss_type", "pref_loss"),
    ("loss.beta", "rl_beta pref_beta"),
    ("loss.gamma", "simpo_gamma"),
    ("loss.teacher", "teacher_model_name_or_path"),
    ("rollout.rewards", "reward_funcs"),
    ("rollout.weights", "reward_weights"),
    ("rollout.batch_size", "generation_batch_size"),
    ("rollout.server", "vllm_server_base_url vllm_server_host"),
    ("rollout.server_seconds", "vllm_server_timeout"),
    (
        "rollout.importance_sampling_mode",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    ),
    (
        "rollout.importance_sampling_clip_max",
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    ),
    ("rollout.importance_sampling_clip_min", "vllm_importance_sampling_clip_min"),
    ("loss.label_smoothing", "label_smoothing_factor dpo_label_smoothing"),
    ("loss.desirable_weight", "kto_chosen_weight"),
    ("loss.undesirable_weight", "kto_rejected_weight"),
    ("checkpoint.every", "save_steps save_strategy saves_per_epoch"),
    ("checkpoint.keep", "save_total_limit"),
    ("checkpoint.best", "metric_for_best_model"),
    ("checkpoint.mode", "greater_is_better"),
    ("checkpoint.load_best", "load_best_model_at_end"),
    ("output.folder", "output_dir"),
    ("output.log_every", "logging_steps logging_strategy steps_per_print"),
    ("output.timeline_every", "wall_clock_breakdown"),
    ("engine.precision", "mixed_precision param_dtype"),
    ("engine.device", "use_cpu no_cuda"),
    ("tracking.to", "report_to use_tensorboard use_swanlab"),
    ("tracking.project", "wandb_project"),
    ("tracking.run_name", "wandb_name"),
    ("tracking.online", "wandb_mode"),
    ("tracking.options", "trackio_space_id wandb_entity mlflow_tracking_uri"),
)

_REASONS = _by_name(
    (
        "training.batch_size counts the rows of a whole optimizer step",
        "gradient_accumulation_steps",
    ),
    ("write engine.precision: bf16", "bf16 pure_bf16"),
    ("torch.set_float32_matmul_precision is left as it is; see engine.precision", "tf32"),
    (
        "masters are fp32, and engine.precision is what layers compute in",
        "dtype torch_dtype upcast_layernorm",
    ),
    ("there is no fp16; engine.precision is bf16, fp32 or fp8", "fp16"),
    ("evaluations compute as training does", "bf16_full_eval fp16_full_eval"),
    (
        "the engine chooses itself what it computes again",
        "gradient_checkpointing gradient_checkpointing_kwargs disable_gradient_checkpointing "
        "activation_checkpointing activation_offloading",
    ),
    (
        "compiled kernels are chosen by the engine",
        "torch_compile torch_compile_backend torch_compile_mode",
    ),
    (
        "the head's loss is taken in chunks always",
        "use_liger_kernel enable_liger_kernel liger_kernel_config "
        "liger_fused_linear_cross_entropy cut_cross_entropy use_unsloth",
    ),
    ("optimizer.name is adamw, adafactor, lion, sgd or muon", "use_galore use_badam use_apollo"),
    ("settings of a rule are keys of the section optimizer", "optim_args"),
    ("of conversations only the replies are learnt", "assistant_only_loss"),
    ("of prompts and completions only the completions are learnt", "completion_only_loss"),
    (
        "only replies are learnt: to learn all, give the rows as text",
        "train_on_inputs train_on_prompt",
    ),
    ("give the earlier replies a weight of 0", "mask_history"),
    ("the assistant's; a message of weight 0 is not learnt", "roles_to_train"),
    ("a reply is learnt with what ends it in the template", "train_on_eos efficient_eos"),
    ("the model's own chat template is used, or that in model.chat_template", "template"),
    ("conversations end with a reply, and prompts with what asks for one", "add_generation_prompt"),
    (
        "data.fields and data.path say what is read; other shapes are yours to rewrite",
        "formatting_func dataset_dir",
    ),
    (
        "data.sequence_length is that of a whole row; data.overlong says what a longer one becomes",
        "max_prompt_length",
    ),
    (
        "rows are padded to the longest of their micro-batch, and no loss sees it",
        "pad_to_sequence_len pad_to_multiple_of label_pad_token_id",
    ),
    (
        "tokenizing takes the cores that there are, and the tokens are kept",
        "dataset_num_proc dataset_batch_size dataset_processes preprocessing_num_workers "
        "preprocessing_batch_size overwrite_cache",
    ),
    ("rows are shuffled by training.seed", "shuffle_dataset shuffle_merged_datasets"),
    ("the system's message stands in the rows, or in model.chat_template", "default_system"),
    ("an adapter begins as init_lora_weights says, with one rate", "loraplus_lr_ratio pissa_init"),
    ("give fewer rows, or end with training.steps", "max_samples"),
    ("conversations go whole into the fullest row with room, text is cut", "packing_strategy"),
    ("with data.packing, documents of a row never see each other", "padding_free"),
    (
        "without packing, rows of like length of a step go together",
        "group_by_length train_sampling_strategy",
    ),
    (
        "the rows of two steps are made ahead",
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers",
    ),
    ("a step takes the next rows, across the end of an epoch", "dataloader_drop_last"),
    (
        "add tokens to tokenizer and model with transformers first",
        "resize_vocab add_tokens new_special_tokens special_tokens tokens pad_token",
    ),
    ("change config.json of the model's folder first", "rope_scaling model_init_kwargs"),
    ("name a folder of that revision in model.path", "model_revision"),
    ("as many rows as in training", "per_device_eval_batch_size eval_batch_size"),
    ("leave training.micro_batch_size out: it is chosen", "auto_find_batch_size"),
    ("the first evaluation is after training.eval_every steps", "eval_on_start eval_delay"),
    (
        "logits never exist as a whole: evaluations measure loss, perplexity and accuracy",
        "compute_metrics compute_accuracy eval_accumulation_steps batch_eval_metrics "
        "prediction_loss_only",
    ),
    (
        "megatrain train trains, and evaluates with training.eval_every",
        "do_train do_eval do_predict",
    ),
    (
        "metrics.jsonl has every step, the console and trackers too with output.log_every: 1",
        "logging_first_step",
    ),
    ("a bar is drawn in a terminal only", "disable_tqdm"),
    (
        "resume with `megatrain train RUN.yaml --resume`",
        "resume_from_checkpoint auto_resume_from_checkpoints ignore_data_skip",
    ),
    (
        "an existing folder is never overwritten; name another output.folder, or --resume",
        "overwrite_output_dir",
    ),
    (
        "checkpoints are exact, and model/ is the model alone, in safetensors",
        "save_only_model save_safetensors",
    ),
    ("training.seed is the one seed, and a resumed run goes on bit for bit", "full_determinism"),
    ("trackers write into the run's folder (output.folder), below tracking/", "logging_dir"),
    (
        "upload what megatrain export writes, with its model card, by hf upload",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo",
    ),
    ("`megatrain export` writes other folders and formats", "export_dir"),
    ("loss.png is always written", "plot_loss"),
    ("loss.name says what is learnt, such as sft or dpo", "stage"),
    (
        "a reference's log-probabilities are computed once, unless loss.reference is streamed",
        "precompute_ref_log_probs",
    ),
    (
        "what is distilled are the replies of the data; make replies of the model with "
        "megatrain generate",
        "lmbda seq_kd",
    ),
    ("the reference is the model as the run begins", "ref_model ref_model_init_kwargs"),
    ("dropout stays as the model has it: set it to 0 there", "disable_dropout"),
    (
        "an adapter is a section: adapter: {method: lora, r: 16, target_modules: all-linear}",
        "finetuning_type use_peft qlora use_lora",
    ),
    (
        "model.base: nf4 or fp8 keeps the frozen base of an adapter so",
        "load_in_4bit load_in_8bit quantization_bit quantization_method bnb_4bit_quant_type "
        "bnb_4bit_compute_dtype bnb_4bit_use_double_quant use_bnb_nested_quant",
    ),
    (
        "the engine makes replies itself, or a vLLM server does: rollout.server",
        "use_vllm vllm_mode",
    ),
    ("a reward is a function, in rollout.rewards, which may ask any model", "reward_model"),
    ("state rests in host memory always", "offload_optimizer"),
    ("weights rest in host memory always", "offload_param low_cpu_mem_usage cpu_offload"),
    (
        "engine.placement says what stays on the device, or auto",
        "reshard_after_forward sharding_strategy",
    ),
    (
        "not needed: a run writes a Hugging Face folder",
        "state_dict_type stage3_gather_16bit_weights_on_model_save",
    ),
    (
        "nothing of it is needed: state rests in host memory; engine.devices takes several GPUs",
        "deepspeed fsdp fsdp_config zero_optimization zero_stage overlap_comm "
        "contiguous_gradients auto_wrap_policy backward_prefetch "
        "fsdp_transformer_layer_cls_to_wrap ddp_timeout ddp_backend ddp_find_unused_parameters "
        "local_rank",
    ),
)


def foreign(name: str) -> str | None:
    """What to write here instead of a key that another trainer has; None: nobody has it."""
    if name in _PLACES:
        return f"its name here is {_PLACES[name]}"
    return _REASONS.get(name)
