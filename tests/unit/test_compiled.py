"""News of compilations, and how many there are."""

import logging
from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, Engine, Placement
from megatrain.model.compiled import compile_and_tell, num_compilations


@pytest.fixture
def quickly(monkeypatch):
    """torch.compile takes graphs as always, but leaves them as they are."""
    torch._dynamo.reset()  # the loss is one function for all engines
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def _engine(**changes):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2)
    config = LlamaConfig(vocab_size=32, **sizes)
    return Engine(config, optimizer=AdamW(), device="cpu", placement=Placement(**changes))


def _step(engine, width=4):
    ids = torch.ones(2, width).long()
    engine.step([{"input_ids": ids, "labels": ids}] * 2)


def test_a_user_is_told_what_is_compiled_before_it_begins(caplog, quickly):
    with caplog.at_level(logging.INFO), _engine(compile=True, keep_layers=1) as engine:
        assert not [m for m in caplog.messages if "compiling" in m]  # nothing before its first call
        _step(engine)
        _step(engine)
    assert [m for m in caplog.messages if "compiling" in m] == [
        "compiling layer kind 1 of 1 (forward)...",
        "compiling layer kind 1 of 1 (kept graph)...",
        "compiling the loss...",
        "compiling layer kind 1 of 1 (backward)...",
    ]


def test_layers_of_a_kind_are_compiled_once_for_a_purpose(quickly):
    before = num_compilations()
    with _engine(compile=True, keep_layers=1) as engine:
        _step(engine)
        assert num_compilations() - before == 4  # forward, kept graph, backward; the loss
        _step(engine)
        assert num_compilations() - before == 4
        _step(engine, width=6)  # another length
        assert num_compilations() - before > 4


def test_nothing_is_compiled_or_told_without_being_asked(caplog, quickly):
    before = num_compilations()
    with caplog.at_level(logging.INFO), _engine() as engine:
        _step(engine)
    assert num_compilations() == before
    assert "compiling" not in caplog.text


def test_what_is_compiled_computes_the_same(quickly):
    double = compile_and_tell(lambda x: x * 2, "a product")
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
