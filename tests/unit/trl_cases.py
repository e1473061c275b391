"""Runs of TRL's trainers, plain or on the engine."""

from pathlib import Path
from typing import Any

from megatrain.integrations import StreamedTrainer


def trained_by(
    kind: Any, settings: Any, folder: Path, rows: Any, *, streamed: bool, more: Any, **given: Any
) -> Any:
    """A trainer after four steps of accumulated micro-batches, with evaluations.

    Args:
        kind, settings: the trainer's class and that of its settings.
        more: settings beside those of all runs, or in their place.
        given: further arguments of the trainer.
    """
    usual: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "max_grad_norm": 0.5,
    }  # fmt: skip
    made = type("Streamed", (StreamedTrainer, kind), {}) if streamed else kind
    trainer = made(
        args=settings(**(usual | more)),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        **given,
    )
    trainer.train()
    return trainer
