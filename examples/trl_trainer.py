"""A script with TRL's SFTTrainer, trained by the engine: one class is all that is new.

    python examples/trl_trainer.py --model Qwen/Qwen2.5-7B --data trl-lib/Capybara --out my-model

Trainer, DPOTrainer and RewardTrainer are mixed in likewise (docs/training.md).
"""

import argparse
from typing import Any, ClassVar

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from megatrain.integrations import StreamedTrainer


class Streamed(StreamedTrainer, SFTTrainer):
    """SFTTrainer with the model in host memory."""

    engine_options: ClassVar[dict[str, Any]] = {}  # such as {"device_memory": "24GiB"}


def main(arguments: list[str] | None = None) -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a hub id or a folder")
    parser.add_argument("--data", required=True, help="a data set of messages, with a split train")
    parser.add_argument("--out", required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    settings = SFTConfig(
        output_dir=given.out,
        max_steps=given.steps,
        max_length=given.length,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,  # of which the engine makes one step, layer by layer
        learning_rate=1e-5,
        bf16=not given.cpu,
        use_cpu=given.cpu,
        logging_steps=1,
        report_to=[],
    )
    rows = load_dataset(given.data, split="train")
    trainer = Streamed(given.model, settings, train_dataset=rows)
    trainer.train()
    trainer.save_model(given.out)


if __name__ == "__main__":
    main()
