"""What generation between steps takes, as it was foretold, and what saves of adapters take."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from megatrain import Engine, Placement
from megatrain.config import Config
from megatrain.engine import whole_model
from megatrain.forecast.cache import generation_bytes
from megatrain.forecast.workload import Generation, Workload
from megatrain.generate import Sampling, continued
from megatrain.model.build import empty_model
from megatrain.model.probe import spec
from tests.counted import CountedDevice, Watch
from tests.inside import sized
from tests.sweeps import swept

ROWS, TOKENS, NEW = 24, 64, 16
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
    eos_token_id=None,
)
PLACEMENT = Placement(slots=1)


@swept(together=0, apart={"alike": False, "apart": True}, precision=["bf16", "fp32"])
def test_generation_takes_what_is_foretold(precision, apart, monkeypatch):
    sized(monkeypatch, whole_model, _HELD=0)  # weights are streamed
    prompts = torch.randint(1, 500, (ROWS, TOKENS - NEW)).tolist()
    prompts[0] = prompts[0][3:]
    sampling = Sampling(max_new_tokens=NEW, temperature=0.7, top_p=0.9)
    with Engine(CONFIG, precision=precision, placement=PLACEMENT, device="cpu") as engine:
        given: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": ROWS, "apart": apart}
        continued(engine, prompts[:1], sampling, GenerationConfig(), **given)  # as it measures
        counted = CountedDevice()
        with Watch(counted):
            made = continued(engine, prompts, sampling, GenerationConfig(), **given)
    assert {len(row) for row in made} == {NEW}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    told = generation_bytes(spec(empty_model(CONFIG)), dtype, ROWS, TOKENS, NEW)
    random = 8 * NEW * ROWS if apart else 0  # numbers
    assert 0.95 * told <= counted.peak_bytes <= told + random + 16 * ROWS  # whether a row goes on


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_plans_of_runs_count_their_replies(beta):
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl", "sequence_length": 1024},
        "loss": {"name": "grpo", "beta": beta},
        "training": {"steps": 1, "batch_size": 1},
        "rollout": {"rewards": ["a:b"]},
    }
    of_run = Workload.of_run(Config.model_validate(tree))
    assert of_run.generation == Generation(512, None, beta > 0)
