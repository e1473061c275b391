"""Tokens a second of `megatrain generate` beside transformers' own.

Random weights of a shape, a batch of random prompts, greedy, no end token: resident through
transformers alone, resident as `open_model` gives it, and streamed from host memory. Each is run
twice, and the second is measured. Prints one line of JSON.
"""

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megatrain import Engine, Placement
from megatrain.cli.shapes import qwen2_config
from megatrain.generate import Resident, open_model


def tokens_per_second(runs: Any, prompts: torch.Tensor, new: int) -> tuple[float, list[Any]]:
    """New tokens of all rows in a second, and the last row's."""
    with runs as model:
        for _ in range(2):
            start = time.perf_counter()
            made = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            row = made[-1, prompts.shape[1] :].tolist()  # waits for the device
            seconds = time.perf_counter() - start
    return len(prompts) * new / seconds, row


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    config = qwen2_config(chosen.shape, 4096)
    torch.manual_seed(0)
    prompts = torch.randint(config.vocab_size, (chosen.rows, chosen.prompt), device=chosen.device)
    found: dict[str, Any] = vars(chosen) | {"torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(chosen.device):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(Path(folder))
        del made
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        plain.to(chosen.device)
        rate, wanted = tokens_per_second(nullcontext(plain), prompts, chosen.new)
        found["transformers"] = rate
        del plain
        resident = open_model(folder, device=chosen.device)
        assert isinstance(resident, Resident)
        rate, row = tokens_per_second(resident.whole_model(), prompts, chosen.new)
        found |= {"resident": rate, "resident_equal": row == wanted}
        resident.close()
        streamed = Engine(folder, device=chosen.device, placement=Placement(slots=3))
        rate, row = tokens_per_second(streamed.whole_model(), prompts, chosen.new)
        found |= {"streamed": rate, "streamed_equal": row == wanted}
        found |= {"weights_bytes": streamed.num_parameters * 2} | streamed.memory()
        streamed.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
