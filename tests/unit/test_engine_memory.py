"""A device that runs out of memory in the middle of a step."""

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, DoesNotFit, Engine
from megatrain.engine.saved_tensors import Graph


def test_out_of_memory_is_one_line_and_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    ids = torch.ones(2, 4).long()
    step = [{"input_ids": ids, "labels": ids}]
    with Engine(config, optimizer=AdamW(lr=0.1), device="cpu", precision="fp32") as engine:
        before = {name: master.clone() for name, master in engine.named_masters()}

        def full(*args: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More")

        with monkeypatch.context() as patch:
            patch.setattr(Graph, "pull", full)
            with pytest.raises(DoesNotFit, match="out of memory.*micro-batches.*no weight") as told:
                engine.step(step)
        assert "\n" not in str(told.value)
        assert all(torch.equal(master, before[name]) for name, master in engine.named_masters())
        assert engine.step(step).loss > 0  # and the engine goes on
        assert any(not torch.equal(m, before[name]) for name, m in engine.named_masters())
