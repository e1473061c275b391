"""Adapters of PEFT, trained as plain torch trains a PeftModel, and written as PEFT writes them."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from megatrain import Engine, InputError, Placement
from megatrain.model.adapters import with_adapter
from megatrain.model.trained import Trained
from megatrain.source.write_model import write_saved
from tests.families.plain import shares
from tests.families.tiny import routing, tiny_model, tiny_multimodal
from tests.inside import parts_of, program_of
from tests.parity.cases import (
    assert_step,
    llama,
    make_batches,
    make_engine,
    masters,
    model_of,
    plain_gradients,
    resumes,
    same,
)
from tests.refusals import refused, table
from tests.sweeps import few, quick

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTERS = {"target_modules": ["o_proj"], "modules_to_save": ["gate"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "DoRA, rsLoRA": (
        "llama", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}
    ),
    "a whole head": (
        "llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}
    ),
    "whole routers": ("deepseek_v3", ROUTERS),
    "some layers": ("llama", {"target_modules": ["up_proj"], "layers_to_transform": [0, 2]}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "tables": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "DoRA of a table": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts' layers": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "experts": (
        "mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "r": 2}
    ),
    "experts with biases": (
        "gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    ),
    "experts, routers and all that is linear": ("deepseek_v3", {"target_modules": "all-linear"}),
    "experts without a gate": (
        "nemotron_h", {"target_parameters": ["experts.up_proj", "experts.down_proj"]}
    ),
    "experts that are merged": (
        "llama4_text", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    ),
    "a tied table": ("gemma2", {"target_modules": "all-linear"}),
}  # fmt: skip
KINDS = {
    "some layers": 2, "a tied table": 2, "whole routers": 2, "experts with biases": 2,
    "experts without a gate": 4,
    "experts, routers and all that is linear": 2, "experts that are merged": 3,
}  # fmt: skip
# Products of these beside the base's are summed in another order than in PEFT's merged weights.
BESIDE = {"experts", *(case for case in CASES if case.startswith("experts ") or "rout" in case)}
BESIDE -= {"experts that are merged"}
USUAL = ("all linear", "DoRA, rsLoRA", "a whole head", "tables", "Conv1D", "experts with biases")


def adapted(family="llama", **keys):
    """Every parameter of the adapter strong enough that no wrong gradient hides."""
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False} | keys)
    return get_peft_model(model_of(family), config)


@pytest.mark.parametrize("case", quick(CASES, USUAL))
def test_gradients_are_those_of_the_plain_model(case):
    family, keys = CASES[case]
    model, [step] = adapted(family, **keys), make_batches(1)
    wanted, engine = plain_gradients(model.get_base_model(), step), make_engine(model, clip=1e9)
    limit = 2e-6 if case in BESIDE else 1e-6 if family == "mixtral" else 1e-30
    assert_step(engine, step, wanted, error=limit)
    assert len(program_of(engine).kinds) == KINDS.get(case, 1)


class Largest(TorchDispatchMode):
    """Notes how many values the largest result of an operation has that is no view."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            self.numel = max([self.numel, *sizes])
        return out


def test_an_adapter_of_experts_makes_nothing_of_the_size_of_their_weights():
    config = LoraConfig(r=2, target_parameters=EXPERTS)
    model = with_adapter(tiny_model("mixtral").to("meta"), config)
    experts = model.model.layers[1].mlp.experts.to_empty(device="cpu")
    for name, parameter in experts.named_parameters():
        torch.nn.init.normal_(parameter.requires_grad_("lora_" in name))
    rows, chosen = torch.randn(6, 32, requires_grad=True), torch.tensor([[0, 1]] * 6)
    with Largest() as largest:
        experts(rows, chosen, torch.ones(6, 2)).sum().backward()
    weights = [p.numel() for name, p in experts.named_parameters() if "lora_" not in name]
    assert 0 < largest.numel < min(weights)
    assert all(p.grad is not None for name, p in experts.named_parameters() if "lora_" in name)


def test_a_fresh_adapter_changes_nothing_at_first_and_is_drawn_as_peft_does():
    model, [step] = llama(), make_batches(1)
    keys = {"r": 64, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    keys["use_dora"] = True  # magnitudes begin as the norms of the base
    engine = make_engine(model, adapter=keys)
    assert engine.evaluate(step) == make_engine(model).evaluate(step)
    got = masters(engine)
    peft_model = get_peft_model(llama(), LoraConfig(**keys)).get_base_model()
    wanted = {name: p.detach() for name, p in peft_model.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, parameter in wanted.items():
        if "lora_A" in name:  # uniform
            assert got[name].abs().max() == pytest.approx(float(parameter.abs().max()), rel=0.1)
        else:
            assert torch.equal(got[name], parameter)
    first, second = (got[name] for name in list(wanted) if "lora_A" in name and ".2." not in name)
    assert not torch.equal(first, second)
    assert same(masters(make_engine(model, adapter=keys)), got)


@pytest.mark.parametrize("held", [(), ("embed_tokens", "lm_head")])
def test_tokens_that_were_added_to_the_base_are_not_lost(tmp_path, held):
    llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(136)
    model = get_peft_model(
        base, LoraConfig(target_modules=["q_proj"], modules_to_save=list(held) or None)
    )
    with make_engine(model) as engine:
        if held:
            engine.save_pretrained(tmp_path / "adapter")
        else:
            with pytest.raises(
                InputError, match=r"has 136 tokens, its base .* 128, and an adapter"
            ):
                engine.save_pretrained(tmp_path / "adapter")
            engine.save_pretrained(tmp_path / "merged", merged=True)


@pytest.mark.parametrize("by", ["gradients", "patterns"])
def test_what_is_trained_beside_an_adapter_is_merged_or_refused(by, tmp_path):
    options: dict[str, Any] = {"adapter": {"target_modules": ["q_proj"]}}
    model: Any = llama()
    if by == "gradients":
        model, options = adapted(target_modules=["q_proj"]), {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    else:
        options["trained"] = Trained(train_only=("lora", "norm"))
    [step] = make_batches(1)
    with Engine(model, precision="fp32", device="cpu", **options) as engine:  # trains nothing
        engine.save_pretrained(tmp_path / "untrained")
    with make_engine(model, **options) as engine:
        engine.step(step)
        told = r"does not hold model\.layers\.0\.input_layernorm\.weight and 6 more, trained beside"
        with pytest.raises(InputError, match=told):
            engine.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()
        engine.save_pretrained(tmp_path / "merged", merged=True)
        loss = engine.evaluate(step)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert loss_of(whole, step) == pytest.approx(loss, rel=1e-4)


def drawn_resumed_and_saved(folder, keys, **options):
    """PEFT's model of an adapter: trained on the base in a folder, saved and merged there."""
    steps = make_batches(2)
    with make_engine(folder / "base", adapter=keys, lr=0.1, **options) as engine:
        assert engine.evaluate(steps[0]) == make_engine(folder / "base").evaluate(steps[0])
        engine.step(steps[0])
        resumes(engine, folder / "saved", steps[1:])
        engine.save_pretrained(folder / "adapter")
        engine.save_pretrained(folder / "merged", merged=True)
        loss, wanted = engine.evaluate(steps[0]), masters(engine)
    plain = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, folder / "adapter")
    assert loss_of(loaded.get_base_model(), steps[0]) == pytest.approx(loss, rel=1e-6)
    with make_engine(folder / "adapter") as again:
        assert again.evaluate(steps[0]) == loss and same(masters(again), wanted)
    return loaded


MERGED = ("experts", "DoRA, rsLoRA", "a whole head", "Conv1D", "experts with biases")


@pytest.mark.parametrize("case", few(MERGED, *range(4)))
def test_adapters_are_drawn_resumed_merged_and_loaded_by_their_libraries(case, tmp_path):
    family, keys = CASES[case]
    model_of(family).save_pretrained(tmp_path / "base")
    loaded = drawn_resumed_and_saved(tmp_path, keys)
    reference = dict(loaded.merge_and_unload().named_parameters())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert same(dict(merged.named_parameters()), reference)


def test_copies_of_routers_have_the_biases_by_which_they_choose(tmp_path):
    """Buffers of theirs are moved, resumed, saved, merged and read as PEFT has them."""
    base = routing("deepseek_v3")
    for bias in (biases := dict(routers_biases(base))).values():
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(4)) / 9)
    base.save_pretrained(tmp_path / "base")
    loaded = drawn_resumed_and_saved(tmp_path, ROUTERS, router_bias_update=0.25)
    held = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert held.keys() == get_peft_model_state_dict(loaded).keys()
    reference = dict(routers_biases(loaded.merge_and_unload()))
    assert not any(torch.equal(bias, biases[name]) for name, bias in reference.items())
    write_saved(tmp_path / "adapter", tmp_path / "again", torch.bfloat16, merged=True)
    for folder in ("merged", "again"):
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert same({name: weights[name] for name in reference}, reference)


def routers_biases(model):
    return [(n, buffer) for n, buffer in model.named_buffers() if "e_score" in n]


def loss_of(model, step):
    with torch.no_grad():
        return sum(map(float, shares(model.eval(), step)))


def test_adapters_of_tables_go_to_peft_and_come_from_it(tmp_path):
    """PEFT saves the base's tables beside them, and loads such adapters without; biases with it."""
    llama(attention_bias=True).save_pretrained(tmp_path / "base")
    [step] = make_batches(1)
    adapter = {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "bias": "all"}
    with make_engine(tmp_path / "base", adapter=adapter) as engine:
        engine.step(step)
        engine.save_pretrained(tmp_path / "ours")
        loss, wanted = engine.evaluate(step), masters(engine)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wrapped = PeftModel.from_pretrained(plain, tmp_path / "ours")
    assert loss_of(wrapped, step) == pytest.approx(loss, rel=1e-6)
    wrapped.save_pretrained(tmp_path / "theirs")
    assert any("base_layer" in n for n in load_file(tmp_path / "theirs/adapter_model.safetensors"))
    with make_engine(tmp_path / "theirs") as engine:
        assert same(masters(engine), wanted)
    wrapped.get_input_embeddings().get_base_layer().weight.data[3] += 1
    wrapped.save_pretrained(tmp_path / "changed")
    with pytest.raises(InputError, match=r"embed_tokens\.base_layer\.weight is not the base's"):
        make_engine(tmp_path / "changed")


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter, whose base lies beside it, and what both hold."""
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    with make_engine(tmp_path / "base", adapter={"target_modules": ["q_proj"]}) as engine:
        engine.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", masters(engine)


def test_a_folder_without_what_its_adapter_needs_says_what(adapter):
    file = adapter[0] / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = min(tensors)
    save_file({name: tensors[name] for name in tensors if name != lost}, file)
    with refused(f"for example {lost}: write the folder again"):
        make_engine(adapter[0])
    file.rename(file.with_name("adapter_model.bin"))
    with refused("no such file; save a .bin again with PEFT"):
        make_engine(adapter[0])


def test_a_folder_with_an_adapter_and_a_configuration_is_an_adapter_s(adapter):
    folder, wanted = adapter
    other = llama()
    other.lm_head.weight.data.zero_()
    other.save_pretrained(folder)  # transformers reads the adapter's base there, too
    with make_engine(folder) as again:
        assert same(masters(again), wanted)


IN_FOLDERS: dict[str, tuple[dict[str, Any], bool]] = {
    "names that match nothing": (
        {"target_modules": ["q_proj", "fc1"], "exclude_modules": ["fc2"], "rank_pattern": {"k": 9},
         "layers_to_transform": [0, 1, 2, 9], "target_parameters": ["w1"]}, False,
    ),
    "a head that is not there": ({"modules_to_save": ["classifier"]}, False),
    "peft_type is LOHA; only LORA": ({"peft_type": "LOHA"}, True),
    "names no base_model_name_or_path": ({"base_model_name_or_path": ["base"]}, True),
    "r is '8', a text; give a number": ({"r": "8"}, True),
    "adapter: 'list' object": ({"rank_pattern": [8]}, True),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_FOLDERS)
def test_a_folder_is_taken_as_peft_takes_it(case, adapter):
    folder, wanted = adapter
    changes, is_refused = IN_FOLDERS[case]
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if is_refused:
        with refused(case):
            make_engine(folder)
        return
    with make_engine(folder) as engine:
        assert same(masters(engine), wanted)


@pytest.mark.parametrize("merged", [False, True])
def test_an_export_does_not_take_the_place_of_the_base(merged, tmp_path):
    base = tmp_path / "base"
    llama().save_pretrained(base)
    before = (base / "model.safetensors").read_bytes()
    with make_engine(base, adapter={"target_modules": ["q_proj"]}) as engine:
        with pytest.raises(InputError, match="is the base of the adapter, which would be lost"):
            engine.save_pretrained(base, merged=merged)
        engine.save_pretrained(tmp_path / "adapter")
    assert (base / "model.safetensors").read_bytes() == before
    for path in (tmp_path / "adapter").iterdir():
        path.rename(base / path.name)
    with pytest.raises(InputError, match="has both a model and an adapter of it; move"):
        make_engine(base)


def test_the_base_on_the_hub_has_the_revision_that_the_adapter_names(adapter, monkeypatch):
    folder, wanted = adapter
    file = folder / "adapter_config.json"
    named = {"base_model_name_or_path": "someone/model", "revision": "v1.5"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))

    def download(model_id, revision=None, **how):
        assert (model_id, revision) == ("someone/model", "v1.5")
        return str(folder.with_name("base"))

    monkeypatch.setattr("megatrain.model.weights.snapshot_download", download)
    with make_engine(folder) as again:
        assert same(masters(again), wanted)


def test_an_adapter_on_a_checkpoint_of_ours(tmp_path):
    [step] = make_batches(1)
    with make_engine(llama()) as engine:
        engine.step(step)
        engine.save(tmp_path / "saved")
        loss, before = engine.evaluate(step), masters(engine)
    with make_engine(tmp_path / "saved", adapter={"target_modules": ["q_proj"]}) as again:
        assert again.evaluate(step) == loss
        again.step(step)
        after = {n.replace(".base_layer", ""): p for n, p in masters(again).items()}
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_adapters_may_come_by_transformers_and_as_a_dictionary(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    model, config = llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.name_or_path = str(tmp_path / "base")
    model.add_adapter(config)
    [step] = make_batches(1)
    wanted, engine = plain_gradients(model, step), make_engine(model, clip=1e9)
    assert_step(engine, step, wanted, error=1e-30)
    engine.save_pretrained(tmp_path / "adapter")
    with make_engine(tmp_path / "adapter") as again:
        assert same(masters(again), masters(engine))
        with make_engine(tmp_path / "base", adapter=config.to_dict()) as other:
            assert masters(other).keys() == masters(again).keys()
    with refused("every parameter of the model with the adapter is frozen"):
        make_engine(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))


def several():
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(target_modules=["v_proj"]))
    return model


def merged_model():
    model = adapted(target_modules=["q_proj"])
    model.merge_adapter()
    return model


# What is said of a model and of options beside it.
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "is merged": (merged_model, {}),
    r"has other beside its active adapter default.*delete_adapter": (several, {}),
    "is_trainable=True": (lambda: adapted(target_modules=["q_proj"], inference_mode=True), {}),
    r"trainable_token_indices = .*\.\.\., .* leave it out; modules_to_save trains whole emb": (
        lambda: adapted(target_modules=["q_proj"], trainable_token_indices=[*range(30)]), {},
    ),
    "has an adapter already": (
        lambda: adapted(target_modules=["q_proj"]), {"adapter": {"r": 4}},
    ),
    r"no adapted module matches 'mlp.experts.w1' \(target_parameters\)": (
        lambda: tiny_model("mixtral"),
        {"adapter": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.w1"]}},
    ),
    "weight of model.layers.0.mamba.dt_proj without calling": (
        lambda: tiny_model("jamba"), {"adapter": {"target_modules": ["dt_proj"]}},
    ),
    "stand for plain linear layers: name others .router. in exclude_modules": (
        lambda: tiny_model("phimoe"), {"adapter": {"target_modules": ["router"]}},
    ),
    "lora_dropout": (
        lambda: tiny_model("mixtral"),
        {"adapter": {"target_parameters": EXPERTS, "lora_dropout": 0.1}},
    ),
}  # fmt: skip
OF_LLAMA = table(__file__, "refusals.yaml")["adapters"]
REFUSED |= {said: (llama, {"adapter": keys}) for said, keys in OF_LLAMA.items()}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_followed_is_refused_by_name(said):
    make, options = REFUSED[said]
    with refused(said):
        make_engine(make(), **options)


@pytest.mark.parametrize("init", few(["eva", "orthogonal", "Gaussian"]))
def test_how_fresh_weights_are_drawn_says_nothing_of_an_adapter_that_has_them(init, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    keys = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": init}
    base, [step] = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), make_batches(1)
    model = get_peft_model(base, LoraConfig(**keys))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.peft_config["default"].corda_config = {"cov_path": "x"}  # as of one that was converted
    model.save_pretrained(tmp_path / "adapter")
    wanted = plain_gradients(model.get_base_model(), step)
    for source in (tmp_path / "adapter", model):
        engine = make_engine(source, clip=1e9)
        assert_step(engine, step, wanted, error=1e-30)
        engine.save(tmp_path / "saved")
        with Engine.load(tmp_path / "saved", device="cpu") as again:
            assert same(masters(again), masters(engine))
    with pytest.raises(InputError, match=f"init_lora_weights is '{init}'; take true"):
        make_engine(llama(), adapter=LoraConfig(**keys))


@pytest.mark.parametrize("more", ["lm_head.weight", "model.layers.0.other.weight"])
def test_what_training_refuses_of_a_base_is_not_merged_either(more, adapter, tmp_path):
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors[more] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{more}' (are tied|is unknown)"):
        write_saved(adapter[0], tmp_path / "merged", merged=True)


def test_a_bias_is_not_merged_where_the_base_has_none(tmp_path):
    adapter = {"target_modules": ["q_proj"], "lora_bias": True}
    with make_engine(llama(attention_bias=True), adapter=adapter) as engine:
        engine.save_pretrained(tmp_path / "merged", merged=True)
    with (
        make_engine(llama(), adapter=adapter) as engine,
        pytest.raises(InputError, match=r"q_proj has no bias .* \(lora_bias\)"),
    ):
        engine.save_pretrained(tmp_path / "other", merged=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("family", "placement"),
    few(
        [
            ("gemma3n_text", Placement(layer_inputs="host")),  # layers hand on several activations
            ("llama", Placement(save_activations=3, save_all=3)),
            ("llama", Placement()),
            ("gemma3n_text", Placement(save_activations=1)),
            ("llama", Placement(save_attention="host", passes=2)),
        ],
        *(0, 1),
    ),
)
def test_nothing_below_the_lowest_adapter_is_kept_or_has_a_backward(family, placement):
    keys = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}
    model, [step] = adapted(family, **keys), make_batches(1)
    wanted = plain_gradients(model.get_base_model(), step)
    engine = make_engine(model, clip=1e9, placement=placement)
    with engine.recording() as spans:
        assert_step(engine, step, wanted, error=1e-30)
    work = Counter(span.name for span in spans)
    assert work["layer 0"] == work["layer 1 backward"] == len(step)
    assert {"layer 0 backward", "prologue backward"}.isdisjoint(work)
    assert not any(getattr(parts_of(engine).saved, "_kept", ()))


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "qwen3_omni_moe_thinker"])
def test_all_linear_is_what_peft_can_wrap_of_the_language_model(family):
    """Not routers with a forward of their own, nor the encoders, whose names mean layers, too."""
    make = tiny_multimodal if family.endswith("thinker") else tiny_model
    with make_engine(make(family), adapter={"r": 2, "target_modules": "all-linear"}) as engine:
        engine.step(make_batches(1)[0])
        adapted = {name for name in masters(engine) if "lora_A" in name}
    assert any("q_proj" in name for name in adapted)
    assert not any(part in name for name in adapted for part in ("router", "audio", "visual"))
