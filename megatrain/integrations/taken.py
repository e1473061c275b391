"""The names of Trainer, SFTTrainer, DPOTrainer, RewardTrainer and their arguments.

Of transformers 5.23 and trl 1.16. `HEEDED` are read, or called, where a plain trainer does so;
`FIXED` are read when the trainer is made, and must not change later; `NO_MEANING` decide nothing of
a step here; all others are refused. A name that these tables lack is refused where a class
overrides it or an argument differs from its default.
"""

from megatrain.base.shipped import shipped

_LOSSES = shipped("docs/losses.md")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CLASSES = {"Trainer", "_BaseTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer"}

# Methods and class attributes that a class may override.
HEEDED_METHODS = _names(
    """__init__ _determine_best_metric _evaluate _get_collator_with_removed_columns _get_dataloader
    _get_eval_sampler _get_learning_rate _get_num_items_in_batch _get_output_dir
    _get_train_sampler _init_training_state _load_callback_state _load_rng_state
    _maybe_log_save_evaluate _prepare_dataset _reject_skip_prepare_without_labels
    _remove_unused_columns _save_checkpoint _save_rng_state _set_signature_columns_if_needed
    _track_num_input_tokens _validate_args add_callback create_scheduler evaluate
    evaluation_loop floating_point_ops get_batch_samples get_decay_parameter_names
    get_eval_dataloader get_test_dataloader get_total_train_batch_size get_train_dataloader
    is_local_process_zero is_world_process_zero log log_metrics metrics_format num_examples
    pop_callback predict remove_callback save_metrics save_model save_state
    set_initial_training_values store_flos train"""
)
NO_MEANING_METHODS = _names(
    """_finish_current_push _hp_search_setup _issue_warnings_after_load _load_scaler _name _paper
    _push_from_checkpoint _report_to_hp_search _save_scaler _send_telemetry _tag_names
    _template_file _tune_save_checkpoint call_model_init create_model_card end
    get_learning_rates get_num_trainable_parameters get_optimizer_group hyperparameter_search
    init_hf_repo push_to_hub"""
)
REFUSED_METHODS = {  # with what to do about it; "": the engine takes its place
    **dict.fromkeys(
        _names(
            """_build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction
            _finalize_training _get_grad_norm _has_mixed_mesh_grads _inner_training_loop
            _load_best_model _load_from_checkpoint _load_optimizer_and_scheduler
            _mixed_mesh_grad_norm _move_model_to_device _precompute_ref_logps
            _prepare_context_parallel_inputs _prepare_for_training _prepare_input
            _prepare_inputs _run_epoch _save _save_optimizer_and_scheduler
            _sync_replicated_trainable_parameters _update_auto_batch_size _wrap_model
            autocast_smart_context_manager compute_loss_context_manager compute_ref_log_probs
            create_accelerator_and_postprocess create_optimizer create_optimizer_and_scheduler
            get_cp_size get_optimizer_cls_and_kwargs get_sp_size get_tp_size prediction_step
            training_step"""
        ),
        "",
    ),
    "compute_loss": f"the engine's loss here is cross entropy; others: {_LOSSES}",
    "_compute_loss": f"the engine's loss here is DPO; others: {_LOSSES}",
    "loss_is_scaled_for_ga": "take it away; override _get_num_items_in_batch to divide otherwise",
}

# Attributes of a trainer.
HEEDED_ATTRIBUTES = _names(
    """_created_lr_scheduler _eval_dataloaders _globalstep_last_logged _initial_global_step
    _initial_num_input_tokens_seen _loggers_initialized _loss_shifts_labels _memory_tracker
    _metrics _signature_columns _total_loss_scalar _total_train_tokens _tr_loss
    _train_batch_size _trial args callback_handler compute_metrics control current_flos
    current_gradient_accumulation_steps data_collator eval_dataset gather_function is_in_train
    lr_scheduler model_accepts_loss_kwargs model_preparation_time optimizer
    preprocess_logits_for_metrics processing_class state train_dataset"""
)
NO_MEANING_ATTRIBUTES = _names(
    """_attn_mask_causal_checked _formatting_func _mixed_mesh_grads _precompute_engine
    _precompute_model_hash _tokenizer chat_template compute_objective hp_name hp_search_backend
    hp_space hub_model_id objective push_in_progress"""
)
FIXED_ATTRIBUTES = _names(
    """_is_vision_dataset _is_vlm _skip_prepare_dataset _tp_size accelerator aux_loss_enabled beta
    can_return_loss completion_only_loss compute_loss_func deepspeed f_alpha_divergence_coef
    f_divergence_type is_deepspeed_enabled is_distributed_loading_by_transformers
    is_fsdp_enabled is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled
    is_model_parallel label_names label_smoother label_smoothing ld_alpha loss_types
    loss_weights maybe_activation_offload_context model model_init model_wrapped
    neftune_hook_handle neftune_noise_alpha optimizer_cls_and_kwargs padding_free
    place_model_on_device precompute_ref_logps ref_model router_aux_loss_coef use_weighting"""
)

# Arguments of `TrainingArguments`, `SFTConfig`, `DPOConfig` and `RewardConfig`.
HEEDED_ARGUMENTS = _names(
    """adam_beta1 adam_beta2 adam_epsilon assistant_only_loss batch_eval_metrics
    chat_template_path completion_only_loss data_seed dataloader_drop_last dataset_kwargs
    dataset_text_field disable_tqdm eos_token eval_delay eval_do_concat_batches eval_on_start
    eval_packing eval_steps eval_strategy full_determinism gradient_accumulation_steps
    greater_is_better ignore_data_skip include_for_metrics include_num_input_tokens_seen
    learning_rate length_column_name load_best_model_at_end logging_first_step logging_steps
    logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_length max_steps
    metric_for_best_model num_train_epochs output_dir packing packing_strategy
    pad_to_multiple_of pad_token per_device_eval_batch_size per_device_train_batch_size
    prediction_loss_only remove_unused_columns report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_only_model save_steps save_strategy save_total_limit
    seed shuffle_dataset skip_memory_metrics tf32 train_sampling_strategy truncation_mode
    warmup_steps weight_decay"""
)
FIXED_ARGUMENTS = _names(
    """beta bf16 center_rewards_coefficient disable_dropout label_names label_smoothing loss_type
    model_init_kwargs optim router_aux_loss_coef trust_remote_code use_cpu"""
)
NO_MEANING_ARGUMENTS = _names(
    """accelerator_config activation_checkpointing activation_checkpointing_kwargs
    average_tokens_across_devices dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor dataset_num_proc ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout discopop_tau
    do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps
    eval_use_gather_object f_alpha_divergence_coef fsdp_config gradient_checkpointing
    gradient_checkpointing_kwargs hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token liger_kernel_config local_rank log_level log_level_replica
    log_on_each_node logging_nan_inf_filter padding_free precompute_ref_batch_size project
    push_to_hub ref_model_mixup_alpha ref_model_sync_steps save_on_each_node
    torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id use_cache"""
)
REFUSED_ARGUMENTS = {  # where they are set: what to do instead
    "activation_offloading": "the engine chooses where activations are kept",
    "auto_find_batch_size": "the engine plans its memory",
    "bf16_full_eval": "evaluations compute as training does; set bf16",
    "debug": "it looks at modules, and the model is streamed",
    "deepspeed": "host memory holds the state already",
    "f_divergence_type": "it must be reverse_kl",
    "fp16": "take bf16, or neither for fp32",
    "fp16_full_eval": "evaluations compute as training does; set bf16",
    "fsdp": "host memory holds the state already",
    "label_smoothing_factor": "use a run file: loss.label_smoothing",
    "ld_alpha": "leave it out",
    "loss_weights": "leave them out",
    "neftune_noise_alpha": "use a run file: training.neftune_alpha",
    "optim_args": "leave them out",
    "optim_target_modules": "leave them out",
    "parallelism_config": "use Engine(group=...)",
    "precompute_ref_log_probs": "the reference is streamed beside the model",
    "sync_ref_model": "the reference stays as it is",
    "torch_compile": "the engine compiles its layers itself",
    "use_liger_kernel": "the head's loss is taken in chunks already",
    "use_weighting": "leave it out",
}

# Constructor options of a trainer, beside the model.
HEEDED_OPTIONS = _names(
    """args callbacks compute_metrics data_collator eval_dataset formatting_func peft_config
    preprocess_logits_for_metrics processing_class ref_model train_dataset"""
)
REFUSED_OPTIONS = {
    "compute_loss_func": REFUSED_METHODS["compute_loss"],
    "model_init": "give the model",
    "optimizer_cls_and_kwargs": "the engine updates; set args.optim and what goes with it",
    "optimizers": "the engine updates; leave the optimizer and its schedule out",
    "quantization_config": "train on a packed base with a run file: model.base: nf4",
}
