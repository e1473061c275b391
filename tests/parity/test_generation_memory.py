"""What generation between steps takes, as it was foretold, and what saves of adapters take."""

from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LlamaConfig

from megatrain import Engine, Placement
from megatrain.checkpoint import open_checkpoint
from megatrain.compat.torch import pytree
from megatrain.config import Config
from megatrain.engine import whole_model
from megatrain.forecast.cache import generation_bytes
from megatrain.forecast.workload import Generation, Workload
from megatrain.generate import Sampling, continued
from megatrain.model.build import empty_model
from megatrain.model.probe import spec
from megatrain.optim import RULES
from megatrain.plan.planner import tile_bytes
from tests.inside import sized, spec_of
from tests.sweeps import few, swept

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


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations have made, at the peak."""

    def __init__(self):
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {self._key(t) for t in pytree.tree_leaves((args, kwargs)) if _real(t)}
        for tensor in filter(_real, pytree.tree_leaves(out)):
            key = self._key(tensor)
            if key in self.known or key in inputs:
                continue
            self.known.add(key)
            size = tensor.untyped_storage().nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            finalize(tensor.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key, size):
        self.known.discard(key)
        self.now -= size

    @staticmethod
    def _key(tensor):
        return tensor.untyped_storage()._cdata


def _real(value):
    return isinstance(value, Tensor) and not value.is_meta


@swept(together=0, apart={"alike": False, "apart": True}, precision=["bf16", "fp32"])
def test_generation_takes_what_is_foretold(precision, apart, monkeypatch):
    sized(monkeypatch, whole_model, _HELD=0)  # weights are streamed
    prompts = torch.randint(1, 500, (ROWS, TOKENS - NEW)).tolist()
    prompts[0] = prompts[0][3:]
    sampling = Sampling(max_new_tokens=NEW, temperature=0.7, top_p=0.9)
    with Engine(CONFIG, precision=precision, placement=PLACEMENT, device="cpu") as engine:
        given: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": ROWS, "apart": apart}
        continued(engine, prompts[:1], sampling, GenerationConfig(), **given)  # as it measures
        with Alive() as alive:
            made = continued(engine, prompts, sampling, GenerationConfig(), **given)
    assert {len(row) for row in made} == {NEW}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    told = generation_bytes(spec(empty_model(CONFIG)), dtype, ROWS, TOKENS, NEW)
    random = 8 * NEW * ROWS if apart else 0  # numbers
    assert 0.95 * told <= alive.peak <= told + random + 16 * ROWS  # whether a row goes on


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


@pytest.mark.parametrize("rule", few(RULES))
def test_a_plan_knows_that_saves_leave_the_base_of_an_adapter_out(rule, tmp_path):
    empty_model(CONFIG).to_empty(device="cpu").save_pretrained(tmp_path / "base")
    keys = {"r": 4, "target_modules": "all-linear"}
    with Engine(
        tmp_path / "base", adapter=keys, optimizer=RULES[rule](), placement=PLACEMENT, device="cpu"
    ) as engine:
        engine.save(tmp_path / "saved")
        tiles = tile_bytes(spec_of(engine), PLACEMENT, Workload(rule=RULES[rule]()))
    manifest = open_checkpoint(tmp_path / "saved").manifest
    planes = [plane for tile in manifest.tiles for plane in tile.planes.values()]
    sizes = {"BF16": 2, "I16": 2, "F32": 4}
    saved = sum(plane.numel * sizes[plane.dtype] for plane in planes)
    assert saved == sum(tile.count * sum(tile.saved) for tile in tiles) > 0
