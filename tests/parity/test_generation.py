"""Texts that a streamed model continues: transformers' own, with a cache, token for token."""

from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from megatrain import AdamW, DoesNotFit, Engine, Placement, RunFailed
from megatrain.compat.transformers import counts_tokens, takes_grouped_products
from megatrain.config import Config
from megatrain.device.base import COPY_IN
from megatrain.engine import whole_model
from megatrain.engine.stream import Stream
from megatrain.forecast.generation import generation_bytes
from megatrain.forecast.workload import Generation, Workload
from megatrain.generate import Sampling, continued, generate
from megatrain.model.build import empty_model
from megatrain.model.media import cache_of
from megatrain.model.probe import spec
from megatrain.model.sizes import experts_of_a_token
from tests.counted import CountedDevice, Watch
from tests.families.examine import PASSES
from tests.families.report import documented
from tests.families.tiny import NOT_TRAINABLE, families, tiny_model
from tests.forks import end
from tests.inside import sized, spec_of, store_of
from tests.parity.cases import SIZES, make_batches, make_engine
from tests.parity.ranks import run_ranks
from tests.race.late import LateDevice
from tests.sweeps import few, on_gpu, quick, swept

GREEDY = Sampling(max_new_tokens=12, temperature=0)
# Rotary and learnt positions, windows, experts, states and both, latent keys, ALiBi, states in a
# list, layers before tables.
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "gemma3_text", "mixtral", "mamba", "falcon_h1",
            "deepseek_v3", "bloom", "rwkv", "cpmant"]  # fmt: skip


def inputs(rows=3, tokens=6):
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "device"),
    few([(family, "cpu") for family in FAMILIES], 0, 3, 5, 7, 8, 10)
    + on_gpu("llama", "gpt2", "gemma2", "mixtral", "bloom", "falcon_h1"),
)
def test_streamed_tokens_are_those_of_transformers(family, device):
    """The rows are longer than the tiny models' windows."""
    given = {name: each.to(device) for name, each in inputs().items()}
    told = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0,
            "eos_token_id": None}  # fmt: skip
    wanted = tiny_model(family).eval().to(device).generate(**given, **told)
    model = tiny_model(family).eval()  # that of RWKV has changed
    options: dict[str, Any] = {"precision": "fp32", "device": device, "placement": Placement()}
    with Engine(model, **options) as engine:
        for spare in (None, 0):
            with engine.whole_model(spare=spare) as whole:
                got = whole.generate(**given, **told, return_dict_in_generate=True)
            assert got.sequences.equal(wanted)
            assert cache_of(got)
        # The engine goes on as if nothing had been.
        fresh = Engine(model, **options)
        batch = {"input_ids": inputs()["input_ids"]}
        assert engine.logits(batch).equal(fresh.logits(batch))


class Copying(LateDevice):
    """Counts bytes that come in; its fresh memory is NaN, and copies wait until they are needed."""

    num_bytes = 0

    def copy(self, stream, to, source, numel=None):
        self.num_bytes += source.data[:numel].nbytes * (stream == COPY_IN)
        super().copy(stream, to, source, numel)


OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 2}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("gpt_oss", {"base": "nf4"}),
    "fp8, an adapter": ("mixtral", {"base": "fp8", "adapter": OF_EXPERTS}),
    "an adapter that is added": (
        "gpt_oss",
        {"adapter": {"target_modules": ["q_proj"]} | OF_EXPERTS},
    ),
}


@pytest.mark.parametrize("name", quick([*families(), *KEPT], {"mixtral", "zaya", *KEPT}))
def test_few_tokens_read_the_experts_that_they_choose(name):
    """Each token of a reply; layers are read whole for the prompt, and where no cache is kept."""
    family, options = KEPT.get(name, (name, {"precision": "fp32"}))
    model = None if family in NOT_TRAINABLE else tiny_model(family).eval()
    experts = [m for m in model.modules() if takes_grouped_products(m)] if model else []
    if not experts or documented()[family][0] != PASSES:
        pytest.skip("it has no stacked experts, or does not pass")
    cached = counts_tokens(model.config.get_text_config(decoder=True))
    given = {"input_ids": torch.tensor([[5, 9, 33, 21, 7]]), "max_new_tokens": 6,
             "use_cache": cached, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
             "return_dict_in_generate": True, "output_logits": True}  # fmt: skip
    device, found = Copying(), []
    with Engine(model, device=device, placement=Placement(slots=2), **options) as engine:
        for choices in (0, whole_model._FEW):
            device.num_bytes = 0
            with mock.patch.object(whole_model, "_FEW", choices), engine.whole_model() as whole:
                got = whole.generate(**given)
            found.append((torch.stack(got.logits), device.num_bytes))
        entries = [(t, e) for t, e in store_of(engine).entries() if ".experts." in e.name]
    (logits, every), (same, some) = found
    assert same.equal(logits) and logits.isfinite().all()
    chosen, num = experts_of_a_token(whole.config)
    stacks = sum(t.weights.data.itemsize * e.stored for t, e in entries if len(e.shape) == 3)
    share = (every - some) / (5 * stacks * (num - chosen) / num)
    # Packed rows share some bytes, and a token of deepseek_v4 may choose an expert twice.
    assert share >= (0.97 if name in KEPT else 1) if cached else not share


@pytest.mark.parametrize(("spare", "times"), [(None, 4), (0, 1), (1 << 60, 4)])
def test_weights_come_once_where_there_is_room_and_change_no_training(monkeypatch, spare, times):
    begun: list[int] = []
    begin = Stream.begin
    monkeypatch.setattr(Stream, "begin", lambda *given: [begun.append(1), begin(*given)])
    kept = Placement(keep_weights=2, resident=("layer 1",))
    options: dict[str, Any] = {"optimizer": AdamW(), "precision": "fp32", "device": "cpu"}
    first, second = make_batches(2)
    with Engine(tiny_model("llama"), placement=kept, **options) as engine:
        engine.step(first)
        begun.clear()
        held = engine.whole_model(spare=spare)
        with held as whole:
            whole.generate(**inputs(), max_new_tokens=4, do_sample=True, eos_token_id=None)
        assert len(begun) == times
        after = engine.step(second)
    with Engine(tiny_model("llama"), **options) as plain:
        plain.step(first)
        wanted = plain.step(second)
    assert (after.loss, after.grad_norm) == (wanted.loss, wanted.grad_norm)


def words():
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {f"w{number}": number for number in range(127)} | {"abcdef": 127}  # for stop strings
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


PROMPTS = ["w5 w6 w7", "w9", "w11 w12 w13 w14"]


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny_model("llama").eval(), precision="fp32", device="cpu")


@pytest.mark.parametrize("family", few(["bloom", "recurrent_gemma", "llama", "mamba"], 0, 1))
def test_padding_changes_no_text(family, caplog):
    """Also of a model whose states run on over it: its prompts share no batch."""
    caplog.set_level("INFO", "megatrain")
    source = Engine(tiny_model(family).eval(), precision="fp32", device="cpu")
    alone = [generate(source, words(), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert generate(source, words(), PROMPTS, GREEDY) == alone
    assert generate(source, words(), PROMPTS, GREEDY, batch_size=2) == alone
    assert any(alone)
    assert ("a batch has prompts of one length" in caplog.text) == (family == "recurrent_gemma")


def test_a_text_ends_with_an_end_token(engine):
    [text] = generate(engine, words(), PROMPTS[:1], GREEDY)
    tokenizer, said = words(), text.split()
    tokenizer.eos_token = next(word for word in said if word != said[0])
    [ended] = generate(engine, tokenizer, PROMPTS[:1], GREEDY)
    assert ended.split() == said[: said.index(tokenizer.eos_token)]


@pytest.mark.parametrize("family", few(["jamba", "blt", "xlnet", "bamba", "xlstm"], 0, 1, 2))
def test_families_without_a_cache_that_counts_tokens_generate(family, caplog):
    """Masks of the first ask for a count that states do not have; others fail with a cache."""
    caplog.set_level("INFO", "megatrain")
    model, prompt = tiny_model(family).eval(), [11, 12, 13]
    told = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(torch.tensor([prompt]), **told, use_cache=False)[0, 3:].tolist()
    with Engine(model, precision="fp32", device="cpu") as source:
        sampling = Sampling(max_new_tokens=3, temperature=0)
        how: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": 1}
        assert continued(source, [prompt], sampling, GenerationConfig(), **how) == [wanted]
    assert family != "jamba" or "takes the whole text again" in caplog.text


def test_drawn_tokens_are_those_of_transformers_up_to_a_stop(engine):
    """With the same seed; the model's own settings change nothing where others are given."""
    drawn = Sampling(12, temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.0, seed=3)
    ids = [[5, 6, 7, 8]] * 3 + [[9, 8, 7, 6]] * 3
    told: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": 6}
    found = continued(engine, ids, drawn, GenerationConfig(), **told)
    model = tiny_model("llama").eval()
    torch.manual_seed(3)
    wanted = model.generate(
        torch.tensor(ids), attention_mask=torch.ones(6, 4, dtype=torch.long), max_new_tokens=12,
        do_sample=True, temperature=0.7, top_p=0.9, top_k=20, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert found == wanted[:, 4:].tolist()
    model.generation_config.suppress_tokens = found[0][:3]
    with Engine(model, precision="fp32", device="cpu") as other:
        assert found == continued(other, ids, drawn, GenerationConfig(), **told)
        assert found != continued(other, ids, drawn, other.generation_config, **told)
    assert len({tuple(each) for each in found[:3]}) == 3  # replies to one prompt differ
    assert found != continued(engine, ids, replace(drawn, seed=4), GenerationConfig(), **told)
    stop = found[0][5]
    ended = continued(engine, ids, drawn, GenerationConfig(), **told | {"stops": {stop}})
    assert ended[0] == wanted[0, 4 : 5 + found[0].index(stop)].tolist()  # the stop is one of them


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.3}, {"top_p": 0.4}, {"top_k": 2}, {"repetition_penalty": 3.0}, {"min_p": 0.6},
    {"typical_p": 0.3}, {"top_h": 0.2}, {"epsilon_cutoff": 0.03}, {"eta_cutoff": 0.9},
    {"no_repeat_ngram_size": 1}, {"suppress_tokens": [*range(40)]},
    {"bad_words_ids": [[66], [9, 8]]}, {"sequence_bias": [[[7], 9.0]]},
    {"begin_suppress_tokens": [66, 118]},
    {"forced_eos_token_id": 4}, {"exponential_decay_length_penalty": (2, 2.0), "eos_token_id": 3},
    {"min_new_tokens": 8, "eos_token_id": [*range(20)]}, {"stop_strings": ["w3", "w1"]},
]  # fmt: skip


@pytest.mark.parametrize(
    "setting", few(SETTINGS, 3, 9, 12, 16, 17), ids=lambda setting: next(iter(setting))
)
def test_each_setting_draws_what_transformers_draws(engine, setting):
    """Be it an option, or one of the model's folder."""
    ids, plain = torch.tensor([[5, 6, 7, 8]] * 2), {"do_sample": True, "top_k": 0}
    how: dict[str, Any] = {"pad": 0, "batch_size": 2, "tokenizer": words()}
    model = tiny_model("llama").eval()
    torch.manual_seed(3)
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, tokenizer=words(),
        **{"temperature": 1.0, "eos_token_id": None, "pad_token_id": 0} | plain | setting,
    )[:, 4:].tolist()  # fmt: skip
    own = GenerationConfig(**{"temperature": 1.0} | plain | setting)
    ends = setting.get("eos_token_id", [])
    stops = {ends} if isinstance(ends, int) else {*ends}

    def cut(rows):
        return [row[: len(row) - next(i for i, t in enumerate(row[::-1]) if t)] for row in rows]

    found = continued(engine, ids.tolist(), Sampling(12, seed=3), own, stops=stops, **how)
    assert cut(found) == cut(wanted)
    named = {f.name for f in fields(Sampling)}
    if named.issuperset(setting):
        own = GenerationConfig(**{"temperature": 1.0} | plain)
        option = Sampling(12, seed=3, **setting)
        assert continued(engine, ids.tolist(), option, own, stops=stops, **how) == found
    own = GenerationConfig(temperature=1.0, **plain)
    assert continued(engine, ids.tolist(), Sampling(12, seed=3), own, stops=stops, **how) != found


@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"stop_strings": ["w125"]},
    ],
    ids=lambda own: next(iter(own)),
)
def test_what_a_model_asks_for_and_is_not_followed_stays_out(engine, own):
    """transformers takes what a call leaves out from the model, also in calls that try it."""
    model = tiny_model("llama").eval()
    model.generation_config.update(**own)
    with Engine(model, precision="fp32", device="cpu") as source:
        found = generate(source, words(), PROMPTS, GREEDY)
    assert found == generate(engine, words(), PROMPTS, GREEDY)


def test_rows_with_draws_of_their_own_heed_a_repetition_penalty(engine):
    """With one token left to draw from, they are those of transformers without draws."""
    ids = torch.tensor([[5, 6, 7, 8]])
    how: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": 1, "apart": True}
    for penalty in (1.0, 3.0):
        wanted = tiny_model("llama").eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            repetition_penalty=penalty, pad_token_id=0, eos_token_id=None,
        )[:, 4:].tolist()  # fmt: skip
        drawn = Sampling(12, temperature=1.0, top_k=1, repetition_penalty=penalty)
        assert continued(engine, ids.tolist(), drawn, GenerationConfig(), **how) == wanted


def test_a_rank_that_ends_or_has_no_room_between_two_tokens_ends_all(tmp_path):
    def work(group):
        engine = make_engine(tiny_model("llama"), group=group, placement=Placement())
        given: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": 8, "apart": True}
        ids = [torch.arange(3, 3 + count).tolist() for count in (5, 2, 5, 2, 4, 2, 5)]
        made, rank = [engine, ids, Sampling(max_new_tokens=9), GenerationConfig()], dist.get_rank()
        forwards = []

        def full(*needed):
            if rank:
                raise DoesNotFit("no room for keys and values")

        with (
            mock.patch("megatrain.generate.texts.check_cache", full),
            pytest.raises(DoesNotFit, match="no room") as refused,
        ):
            continued(*made, **given)
        assert refused.value.by_all

        def ends(module, given):
            forwards.append(module)
            if rank and len(forwards) == 6:
                end()

        spec_of(engine).capture.model.register_forward_pre_hook(ends)
        with pytest.raises(RunFailed, match="rank 0 of 2 has lost the others") as lost:
            continued(*made, **given)
        assert not lost.value.by_all
        end()

    run_ranks(2, tmp_path, work, whole=False)


# What generation between steps takes, as it was foretold, and what saves of adapters take.


MANY, LONG, NEW = 24, 64, 16
LARGER = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
CONFIG = LlamaConfig(**SIZES | LARGER, eos_token_id=None)


@swept(together=0, apart={"alike": False, "apart": True}, precision=["bf16", "fp32"])
def test_generation_takes_what_is_foretold(precision, apart, monkeypatch):
    sized(monkeypatch, whole_model, _USABLE=0)  # weights are streamed
    prompts = torch.randint(1, 500, (MANY, LONG - NEW)).tolist()
    prompts[0] = prompts[0][3:]
    sampling = Sampling(max_new_tokens=NEW, temperature=0.7, top_p=0.9)
    with Engine(CONFIG, precision=precision, placement=Placement(slots=1), device="cpu") as engine:
        given: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": MANY, "apart": apart}
        continued(engine, prompts[:1], sampling, GenerationConfig(), **given)  # as it measures
        counted = CountedDevice()
        with Watch(counted):
            made = continued(engine, prompts, sampling, GenerationConfig(), **given)
    assert {len(row) for row in made} == {NEW}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    told = generation_bytes(spec(empty_model(CONFIG)), dtype, MANY, LONG, NEW)
    random = 8 * NEW * MANY if apart else 0  # numbers
    assert 0.95 * told <= counted.peak_bytes <= told + random + 16 * MANY  # whether a row goes on


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
