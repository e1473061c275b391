"""Several ranks train as one does on the micro-batches of all of them."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from megatrain import DoesNotFit, Engine, InputError, Placement, RunFailed
from megatrain.checkpoint import files, open_checkpoint, verify
from megatrain.device import disk
from megatrain.device.disk import BLOCK
from megatrain.errors import StepRefused
from megatrain.forecast.workload import Generation
from megatrain.kernels.states import GROUP
from megatrain.loss import CROSS_ENTROPY, DPO, GRPO, LabelSmoothing, TokenWeights
from megatrain.model.safetensors_io import read_header
from megatrain.model.trained import Trained
from megatrain.tile.formats import PACKINGS
from megatrain.train.sharing import part_of as run_part_of
from tests.families.folders import tensors_of
from tests.families.tiny import routing, tiny_model
from tests.forks import end
from tests.inside import store_of
from tests.parity.cases import (
    VOCAB,
    llama,
    make_batches,
    make_engine,
    masters,
    padded,
    qwen2,
    replies,
    same,
)
from tests.parity.ranks import refused, run_ranks, train_as_one, training
from tests.parity.test_dropout import RATES
from tests.sweeps import few

SHAPES = ((2, 12), (1, 7), (3, 5), (2, 9))
LORA = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
FP32 = {"dtype": torch.float32}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def published():
    """The configuration of a model whose experts come in mxfp4."""
    config = tiny_model("gpt_oss", changes={"hidden_size": 64, "intermediate_size": 32}).config
    config.quantization_config = {"quant_method": "mxfp4"}
    return config


def part_of(step, group):
    """The first micro-batch for rank 0, the others for the rest as evenly as can be."""
    if group is None:
        return step
    rank, size, rest = dist.get_rank(), dist.get_world_size(), step[1:]
    edges = [len(rest) * each // (size - 1) for each in range(size)]
    return step[:1] if rank == 0 else rest[edges[rank - 1] : edges[rank]]


def weighed(steps):
    """With weights for each token; only the first micro-batch counts."""
    return [
        [
            micro | {"token_weights": torch.full(micro["labels"].shape, float(index == 0))}
            for index, micro in enumerate(step)
        ]
        for step in steps
    ]


def pairs(loss):
    """Two steps of replies, those of a pair in micro-batches of different ranks."""
    *rest, last = replies(loss)
    both = [{name: value[part] for name, value in last.items()} for part in (slice(2), slice(2, 3))]
    return [[*rest, *both]] * 2


def train(group, model, loss=CROSS_ENTROPY, batches=None, **options):
    """The numbers that training leaves and says, each tile that is on a disk in several pieces."""
    with (
        mock.patch.object(disk, "PIECE", BLOCK // 2),
        make_engine(model, group=group, **options) as engine,
    ):
        steps = [part_of(step, group) for step in batches or make_batches(2, SHAPES)]
        return training(engine, steps, loss)


ON_DISK = Placement(
    slots=2, disk_moments=9, disk_remainder=9, disk_weights=9, resident=("layer 0",)
)


MUON = {
    "streamed": Placement(slots=1, keep_rows=False),
    "resident, in passes": Placement(slots=2, passes=2, resident=("layer 1", "head")),
    "on a disk": ON_DISK,
}


def muon(group, model, *given, **options):
    """As `train`; a direction that is off by a bit of bf16 moves a weight by less than 1e-6."""
    options = {"lr": 2e-5, "batches": make_batches(1, SHAPES)} | options
    return train(group, model, *given, **options)


def one_row(group, model):
    """As `train`, of a micro-batch for one rank: the rows of the others count for no router."""
    with make_engine(model, group=group) as engine:
        assert engine.balances_experts
        [step] = make_batches(1, SHAPES[:1])
        step = run_part_of(step, engine.ranks, counted=True)
        return {n: t for n, t in training(engine, [step], CROSS_ENTROPY).items() if n != "tokens"}


def biased(group, model):
    """As `train`, with the biases of routers, which move by the tokens of all ranks."""
    options = {"router_z_loss_coef": 0.1, "router_bias_update": 0.25, "clip": 1e9}
    with make_engine(model, group=group, **options) as engine:
        steps = [part_of(padded(step), group) for step in make_batches(2, SHAPES)]
        found = training(engine, steps, CROSS_ENTROPY)
        with engine.whole_model() as whole:
            biases = {n: b.clone() for n, b in whole.named_buffers() if "correction_bias" in n}
    assert any(bias.abs().max() > 0.25 for bias in biases.values())
    return found | biases


def case(make, *given, by=train, **options):
    """A training of the model that `make` makes, by a group or alone."""
    return lambda group: by(group, make(), *given, **options)


TIED = {"tie_word_embeddings": True}
CLOSE: dict[str, Callable[[Any], dict]] = {
    "untied, clipped": case(llama, clip=0.5),
    "tied, not clipped": case(partial(llama, **TIED), clip=None),
    "dropout, boundaries on the host": case(
        partial(tiny_model, "gpt2", changes=RATES),
        placement=Placement(slots=1, layer_inputs="host", keep_rows=False),
    ),
    "tied, rows that are not kept, graphs that are": case(
        partial(qwen2, **TIED),
        placement=Placement(slots=3, keep_rows=False, save_activations=2, keep_weights=2),
    ),
    "resident, in passes": case(
        partial(tiny_model, "qwen3_moe"),
        clip=0.5,
        placement=Placement(
            slots=2, passes=3, resident=("embedding", "layer 0", "head"), layer_inputs="host"
        ),
    ),
    "tied, resident in part, not clipped": case(
        partial(qwen2, **TIED),
        clip=None,
        trained=Trained(freeze=("k_proj", "layers.1")),
        placement=Placement(
            slots=1, resident=("layer 0", "layer 1", "head"), offload_activations=1
        ),
    ),
    "frozen in part": case(llama, trained=Trained(freeze=("embed_tokens", "q_proj", "norm"))),
    **{
        f"{rule}, {clip}": case(llama, by=muon, rule=rule, clip=clip)
        for rule in ("muon", "muon clipped")
        for clip in (None, 0.5)
    },
    "preferences, in passes": case(
        llama, DPO(), pairs(DPO()), placement=Placement(passes=2, resident=("head",))
    ),
    "adapter": case(
        partial(qwen2, **TIED),
        adapter=LORA | {"use_dora": True, "modules_to_save": ["norm"]},  # begin as the base is
        placement=Placement(resident=("layer 1",), keep_weights=2),
    ),
    "experts that are balanced": case(
        partial(tiny_model, "mixtral", changes=ROUTED),
        batches=[padded(step) for step in make_batches(2, SHAPES)],
    ),
    "biases of routers": case(partial(routing, "deepseek_v3"), by=biased),
    "a row of one rank": case(partial(tiny_model, "mixtral", changes=ROUTED), by=one_row),
}


def exact(make, **options):
    """A training whose gradients are zero on all ranks but one, and not clipped."""
    steps = weighed(make_batches(2, SHAPES))
    options = {"clip": 1e9, "precision": "bf16", "batches": steps} | options
    return case(make, TokenWeights(), **options)


EXACT: dict[str, Callable[[Any], dict]] = {
    "fp32, adamw": exact(llama, precision="fp32"),
    "bf16, adamw bf16": exact(llama, rule="adamw bf16"),
    "bf16, lion": exact(partial(llama, **TIED), rule="lion"),
    "bf16, frozen in part": exact(
        llama,
        rule="adamw int8",
        trained=Trained(freeze=("model.norm",)),
        placement=Placement(slots=2),
    ),
    "bf16, some in fp32, on a disk": exact(
        partial(tiny_model, "hunyuan_v1_moe"), placement=ON_DISK
    ),
    "bf16, planes on a disk": exact(
        partial(llama, **TIED),
        trained=Trained(freeze=("k_proj", "layers.1.mlp")),
        placement=ON_DISK,
    ),
    **{
        f"{precision}, {rule}, {where}": exact(
            llama if rule == "muon" else partial(tiny_model, "mixtral"),
            by=muon,
            lr=1e-2,
            precision=precision,
            rule=rule,
            placement=placement,
        )
        for precision, rule in (("fp32", "muon"), ("bf16", "muon"), ("bf16", "muon clipped"))
        for where, placement in MUON.items()
    },
    **{
        f"{base}, adapter": exact(
            llama,
            adapter=LORA,
            base=base.removesuffix(" by fp8"),
            precision="fp8" if base.endswith("by fp8") else "bf16",
            placement=Placement(slots=2, resident=("layer 1",), keep_weights=2),
        )
        for base in ("nf4", "fp8", "bf16 by fp8")
    },
    "as its folder has it, adapter": exact(
        published,
        adapter={"r": 3, "target_modules": "all-linear"},
        base="folder",
        precision="bf16",
        placement=Placement(slots=2),
    ),
}
USUAL = (
    *("tied, rows that are not kept, graphs that are", "preferences, in passes", "nf4, adapter"),
    *("bf16, planes on a disk", "muon clipped, 0.5", "biases of routers", "a row of one rank"),
)
REST = (
    *("frozen in part", "resident, in passes", "experts that are balanced"),
    *("bf16, lion", "bf16, frozen in part", "bf16, some in fp32, on a disk"),
    *("bf16, muon, on a disk", "fp32, muon, resident, in passes"),
    *("bf16 by fp8, adapter", "as its folder has it, adapter"),
)
ON_HOSTS = ("tied, rows that are not kept, graphs that are", "muon clipped, 0.5")
MORE_ON_HOSTS = (
    *("experts that are balanced", "preferences, in passes"),
    *("untied, clipped", "resident, in passes", "muon, None"),
)
LAYOUTS = [
    *((1, 2, USUAL), (2, 2, ON_HOSTS), (1, 2, REST), (1, 3, CLOSE | EXACT), (1, 4, USUAL + REST)),
    *((2, 2, MORE_ON_HOSTS), (2, 1, ON_HOSTS + MORE_ON_HOSTS), (3, 1, ON_HOSTS + MORE_ON_HOSTS)),
]


def of_hosts(hosts, each):
    """Ranks in a mesh as HSDP takes it: hosts keep the model each."""
    return init_device_mesh("cpu", (hosts, each))


@pytest.mark.parametrize(("hosts", "each", "names"), few(LAYOUTS, 0, 1))
def test_ranks_train_as_one(hosts, each, names, tmp_path):
    """To the order of sums; and to the bit where all ranks but one have gradients of zero."""

    def mesh(group):
        return of_hosts(hosts, each) if hosts > 1 else group

    ranks = train_as_one(hosts * each, tmp_path, CLOSE | EXACT, names, EXACT, mesh)
    for found in ranks if hosts > 1 else []:
        assert all(same(found[name], ranks[0][name]) for name in names)


def other_weights():
    """A model of the same structure."""
    model = llama()
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    return model


# What rank 1 does otherwise than rank 0, and what all ranks say of it.
OTHERWISE: dict[str, tuple[dict, str]] = {
    "seed": ({"seed": 1}, "rank 1 has another seed"),
    "verify": ({"verify": "step"}, "rank 1 has another verify"),
    "attention": ({"attn_implementation": "eager"}, "another implementation of attention"),
    "optimizer": ({"lr": 0.3}, "rank 1 has another optimizer"),
    "model": ({"model": qwen2}, "rank 1 has another model"),
    "weights": ({"model": other_weights}, "rank 1 has another model in memory"),
    "depth": ({"model": lambda: llama(num_hidden_layers=2)}, '"num_hidden_layers": 2, '),
}


def test_what_ranks_do_otherwise_is_refused_by_all(tmp_path):
    [step] = make_batches(1, SHAPES)
    llama().save_pretrained(tmp_path / "base")
    for seed in range(2):
        with make_engine(tmp_path / "base", adapter=LORA, seed=seed) as engine:
            engine.save_pretrained(tmp_path / f"adapter {seed}")

    def work(group):
        rank = dist.get_rank(group)
        for own, words in OTHERWISE.values():
            options = {"model": llama, **(own if rank else {})}
            model = options.pop("model")()
            refused(InputError, words, make_engine, model, group=group, **options)
        adapter, words = tmp_path / f"adapter {rank}", "rank 1 has another file of the adapter"
        refused(InputError, words, make_engine, adapter, group=group)
        engine = make_engine(llama(), group=group)
        before = masters(engine)
        for call, words in bad_calls(engine, step, rank):
            refused(InputError, words, call)
        good = part_of(step, group)
        refused(StepRefused, "above 0", lambda: engine.step(good, norm_limit=0.0))
        assert engine.steps == 0
        assert same(masters(engine), before)
        assert engine.step(good).loss > 0
        mesh = init_device_mesh("cpu", (2,))
        gpt2 = tiny_model("gpt2", changes={"vocab_size": VOCAB})  # its tied table is last by name
        for model in (llama(), gpt2):
            only_run = Engine(model, group=mesh, device="cpu", precision="fp32")
            alone = Engine(model, device="cpu", precision="fp32")
            assert only_run.evaluate(good) == pytest.approx(alone.evaluate(step), abs=1e-6)
            assert torch.equal(only_run.logits(good[0]), alone.logits(good[0]))
        words = "a DeviceMesh of one dimension, or of two that has all ranks in their order"
        for others in (torch.tensor([[1, 0]]), torch.arange(2).view(1, 1, 2)):
            mesh = DeviceMesh("cpu", others)
            refused(InputError, words, make_engine, llama(), group=mesh)
        beside = {"loss": GRPO(beta=0.1), "generation": Generation(6, rows=6, reference=True)}
        make_engine(gpt2, group=group, **beside).close()

    run_ranks(2, tmp_path, work)


def bad_calls(engine, step, rank):
    """Calls that rank 1, or both, get wrong, and what both say."""
    own = step[rank : rank + 1]
    broken = [{"input_ids": own[0]["input_ids"] + 1000 * rank, "labels": own[0]["labels"]}]

    def scheduled():
        assert engine.optimizer is not None
        group = engine.optimizer.param_groups[0]
        kept, group["lr"] = group["lr"], group["lr"] * (1 + rank)
        try:
            engine.step(own)
        finally:
            group["lr"] = kept

    def clipped():
        engine.max_grad_norm = 1.0 + rank
        try:
            engine.step(own)
        finally:
            engine.max_grad_norm = 1.0

    return [
        (clipped, "another max_grad_norm, norm_limit, expected"),
        (lambda: engine.step(own, expected=(1.0, 1.0) if rank else None), "limit, expected"),
        (lambda: engine.step(broken), "outside the model's vocabulary"),
        (lambda: engine.step(own[: 1 - rank]), "at least one micro-batch"),
        (scheduled, "another settings of the optimizer"),
        (lambda: engine.step(own, LabelSmoothing(0.1 + rank / 10)), "rank 1 has another loss"),
        (lambda: engine.evaluate(own) if rank else engine.step(own), "rank 1 has another call"),
    ]


def test_formats_of_weights_read_alike_in_every_process():
    """Ranks compare the layouts of their tiles so; functions have other addresses in each."""
    assert [repr(each) for each in PACKINGS.values()] == [*PACKINGS]


def test_a_rank_that_ends_ends_the_others(tmp_path):
    [step] = make_batches(1, SHAPES)

    def work(group):
        engine = make_engine(llama(), group=group)
        engine.step(part_of(step, group))
        if dist.get_rank(group) == 1:
            return
        refused(RunFailed, "rank 0 of 2 has lost the others", lambda: engine.step(step))
        end()

    run_ranks(2, tmp_path, work, whole=False)


@pytest.mark.exhaustive
def test_a_disk_that_is_full_for_one_rank_is_refused_by_all(tmp_path):
    full, place = OSError(28, "No space left on device"), tmp_path / "disk"
    options = {"placement": ON_DISK, "precision": "bf16", "disk": place}
    place.mkdir()

    def work(group):
        rank = dist.get_rank(group)
        said = "rank 1: " * (rank == 0) + f"{place}: no room for planes on this disk"
        fault = full if rank else None
        with mock.patch.object(os, "posix_fallocate", side_effect=fault, create=True):
            refused(DoesNotFit, said, make_engine, llama(), group=group, **options)
        words = "keeps 1 MiB on the disk, and disk_space is 1 MiB"
        few = options | {"disk_space": 200 << 10}  # of which a rank has half
        refused(DoesNotFit, words, make_engine, llama(), group=group, **few)

    run_ranks(2, tmp_path, work)
    assert not [*place.iterdir()]


def saved_state(folder):
    """Every number of every parameter in a checkpoint, by plane and name; not its padding."""
    found, checkpoint = {}, open_checkpoint(folder)
    verify(folder)
    for record in checkpoint.manifest.tiles:
        stored = {each.name: each.read() for each in read_header(folder / record.file)}
        for each in record.parameters:
            for plane, values in stored.items():
                per = GROUP if "scale" in plane else 1
                part = values[each.offset // per : -(-(each.offset + each.entry.numel) // per)]
                found[f"{plane} of {each.name}"] = part
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["adamw int8", "muon"])
def test_any_number_of_ranks_goes_on_from_a_checkpoint_bit_for_bit(rule, tmp_path):
    """Two ranks save, three load and save, one loads that; then all that was saved is the same."""
    first, second = make_batches(2, SHAPES)
    options = {"precision": "bf16", "rule": rule, "trained": Trained(freeze=("q_proj",))}
    options |= {"placement": Placement(resident=("layer 1", "head"))}

    def save(group):
        engine = make_engine(llama(tie_word_embeddings=True), group=group, **options)
        engine.step(part_of(first, group))
        saving = engine.save(tmp_path / "two", extra={"a": 1}, wait=False)
        loss = engine.step(part_of(second, group)).loss  # meanwhile
        saving.wait()
        engine.save_pretrained(tmp_path / "model of two")
        lora = make_engine(llama(), group=group, adapter=LORA, precision="bf16", base="nf4")
        lora.step(part_of(first, group))
        lora.save(tmp_path / "adapter")
        lora.save_pretrained(tmp_path / "adapter alone")
        lora.save_pretrained(tmp_path / "merged", merged=True, **FP32)
        return masters(engine), loss

    def load(group):
        adapters.update(masters(Engine.load(tmp_path / "adapter", group=group)))
        engine = Engine.load(
            tmp_path / "two", group=group, placement=ON_DISK, disk=tmp_path / "ranks"
        )
        engine.save(tmp_path / "three")
        loss = engine.step(part_of(second, group)).loss
        full = OSError(28, "No space left on device") if dist.get_rank(group) == 1 else None
        wraps = None if full else files.NewFile.write
        with mock.patch.object(files.NewFile, "write", autospec=True, side_effect=full or wraps):
            refused(RunFailed, "No space left on device", engine.save, tmp_path / "none")
        return masters(engine) | adapters, loss

    adapters: dict[str, torch.Tensor] = {}  # all names differ from those of the other engine
    [(trained, loss), *_] = run_ranks(2, tmp_path, save)
    others = run_ranks(3, tmp_path / "ranks", load)
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]
    alone = Engine.load(tmp_path / "three", device="cpu", disk=tmp_path)
    alone.save(tmp_path / "one")
    states = [saved_state(tmp_path / name) for name in ("two", "three", "one")]
    assert len(states[0]) > 3 * len(trained)
    assert all(same(states[0], other) for other in states[1:])
    assert [loss] * 4 == pytest.approx([each[1] for each in others] + [alone.step(second).loss])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model of two", dtype=torch.float32)
    exported = dict(model.named_parameters())
    assert same(exported, {name: trained[name] for name in exported})
    lora = Engine.load(tmp_path / "adapter", device="cpu")
    assert all(same(masters(lora), {n: each[n] for n in masters(lora)}) for each, _ in others)
    for folder, how in (("adapter alone", {}), ("merged", {"merged": True, **FP32})):
        lora.save_pretrained(tmp_path / f"{folder} again", **how)
        ours, theirs = (tensors_of(tmp_path / name) for name in (folder, f"{folder} again"))
        assert same(ours, theirs) and len(ours) > 3


def test_a_rank_that_hangs_is_named(tmp_path):
    [step] = make_batches(1, SHAPES)

    def work(group):
        engine, told = make_engine(llama(), group=group), tmp_path / "told"
        if dist.get_rank(group) == 1:
            while not told.exists():
                time.sleep(0.02)
            return
        with mock.patch.dict(os.environ, MEGATRAIN_RANK_TIMEOUT="1"):
            refused(RunFailed, "Ranks 1 failed to pass", lambda: engine.step(step))
        told.touch()

    run_ranks(2, tmp_path, work)


@pytest.mark.exhaustive
def test_any_layout_goes_on_from_a_checkpoint_of_hosts_bit_for_bit(tmp_path):
    """Two hosts of two save; one rank, two, two hosts of one and one of two go on, and save."""
    first, second = make_batches(2, SHAPES)
    saved = tmp_path / "hosts"
    options: dict = {"precision": "bf16", "verify": "off"}  # hosts compare what they save, too
    options["placement"] = Placement(slots=2, resident=("layer 1",))

    def save(group):
        mesh, rank = of_hosts(2, 2), dist.get_rank()
        engine = make_engine(llama(tie_word_embeddings=True), group=mesh, **options)
        assert engine.ranks.shards.size == 2 and engine.ranks.replicas.size == 2
        engine.step(part_of(first, group))
        engine.save(saved)
        engine.save_pretrained(tmp_path / "model")
        listed = os.listdir
        there = mock.patch.object(files.os, "listdir", lambda at: listed(at) if rank != 3 else [])
        with there:
            refused(RunFailed, "made by rank 0, but not there on", engine.save, tmp_path / "none")
        kept = masters(engine)
        if rank == 2:  # of the second host, a bit falls over
            store_of(engine).tiles[2].weights.data[0] += 1
        refused(RunFailed, "differ between hosts", engine.save, tmp_path / "none")
        return kept

    def load(shape):
        def work(group):
            engine = Engine.load(saved, group=group and of_hosts(*shape), device="cpu")
            there = masters(engine)
            engine.save(tmp_path / f"again {shape}")
            return there, engine.step(part_of(second, group)).loss

        return work

    every = run_ranks(4, tmp_path, save)
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]
    wanted, loss = load((1, 1))(None)
    assert all(same(wanted, found) for found in every)
    for shape in ((1, 2), (2, 1), (3, 1)):
        for found, own in run_ranks(shape[0] * shape[1], tmp_path / f"ranks {shape}", load(shape)):
            assert same(found, wanted) and own == pytest.approx(loss, rel=2e-6)
        again = saved_state(tmp_path / f"again {shape}")
        assert same(saved_state(saved), again)
