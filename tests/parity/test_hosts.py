"""Hosts that keep the model each train as one rank does on the micro-batches of all of them."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatrain import Engine, Placement
from megatrain.checkpoint import files
from megatrain.errors import InputError, RunFailed
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, same
from tests.parity.ranks import run_ranks
from tests.parity.test_ranks import CLOSE, SHAPES, part_of, refused, saved_state
from tests.sweeps import few

USUAL = (
    "tied, rows that are not kept, graphs that are",
    "experts that are balanced",
    "preferences, in passes",
    "muon clipped, 0.5",
)
REST = ("untied, clipped", "resident, in passes", "muon, None")


def by_hosts(hosts, each):
    """Ranks in a mesh as HSDP takes it."""
    return init_device_mesh("cpu", (hosts, each))


def on_hosts(make):
    """What a case of ranks makes where a mesh is the engine's group."""

    def made(mesh):
        if mesh is None:
            return make(None)
        with mock.patch("tests.parity.test_ranks.make_engine") as engine:
            engine.side_effect = lambda *a, group, **o: make_engine(*a, group=mesh, **o)
            return make(dist.group.WORLD)

    return made


@pytest.mark.parametrize(
    ("hosts", "each", "names"),
    few([(2, 2, USUAL), (2, 2, REST), (2, 1, USUAL + REST), (3, 1, USUAL + REST)]),
    ids=["2-2", "2-2 exhaustive", "2-1 exhaustive", "3-1 exhaustive"],
)
def test_hosts_train_as_one(hosts, each, names, tmp_path):
    """Each of them has the weights of all, to the bit."""
    cases = {name: on_hosts(CLOSE[name]) for name in names}
    alone = {name: make(None) for name, make in cases.items()}

    def work(group):
        mesh = by_hosts(hosts, each)
        return {name: make(mesh) for name, make in cases.items()}

    every = run_ranks(hosts * each, tmp_path, work)
    for rank, found in enumerate(every):
        for name, values in found.items():
            for what, value in alone[name].items():
                close = torch.allclose(values[what], value, rtol=2e-6, atol=1e-6)
                assert close, (rank, name, what, values[what], value)
                assert torch.equal(values[what], every[0][name][what]), (rank, name, what)


@pytest.mark.exhaustive
def test_any_layout_goes_on_from_a_checkpoint_of_hosts_bit_for_bit(tmp_path):
    """Two hosts of two save; one rank, two, two hosts of one and one of two go on, and save."""
    first, second = make_batches(2, SHAPES)
    saved = tmp_path / "hosts"
    options: dict = {"precision": "bf16", "verify": "off"}  # hosts compare what they save, too
    options["placement"] = Placement(slots=2, resident=("layer 1",))

    def save(group):
        mesh, rank = by_hosts(2, 2), dist.get_rank()
        engine = make_engine(llama(tie_word_embeddings=True), group=mesh, **options)
        assert engine.ranks.shards.size == 2 and engine.ranks.replicas.size == 2
        engine.step(part_of(first, group))
        engine.save(saved)
        engine.save_pretrained(tmp_path / "model")
        listed = os.listdir
        there = mock.patch.object(files.os, "listdir", lambda at: listed(at) if rank != 3 else [])
        with there:
            refused(RunFailed, "is not to be seen from", engine.save, tmp_path / "none")
        kept = masters(engine)
        if rank == 2:  # of the second host, a bit falls over
            store_of(engine).tiles[2].weights.data[0] += 1
        refused(RunFailed, "on one host than on another", engine.save, tmp_path / "none")
        return kept

    def load(shape):
        def work(group):
            engine = Engine.load(saved, group=group and by_hosts(*shape), device="cpu")
            there = masters(engine)
            engine.save(tmp_path / f"again {shape}")
            return there, engine.step(part_of(second, group)).loss

        return work

    every = run_ranks(4, tmp_path, save)
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]
    wanted, loss = load((1, 1))(None)
    assert all(same(wanted, found) for found in every)
    for shape in ((1, 2), (2, 1), (3, 1)):
        (tmp_path / f"ranks {shape}").mkdir()
        for found, own in run_ranks(shape[0] * shape[1], tmp_path / f"ranks {shape}", load(shape)):
            assert same(found, wanted) and own == pytest.approx(loss, rel=2e-6)
        again = saved_state(tmp_path / f"again {shape}")
        assert same(saved_state(saved), again)


def test_a_mesh_that_is_none_of_hosts_is_refused(tmp_path):
    def work(group):
        others = DeviceMesh("cpu", torch.tensor([[1, 0]]))
        words = "it must have all ranks in their order"
        refused(InputError, words, make_engine, llama(), group=others)
        deep = DeviceMesh("cpu", torch.arange(2).view(1, 1, 2))
        refused(InputError, "of one or two dimensions", make_engine, llama(), group=deep)

    run_ranks(2, tmp_path, work)
