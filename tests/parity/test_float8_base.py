"""Products in float8 with a frozen base: as plain PyTorch that quantises so, near bf16, exact."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from megatrain import InputError, Placement
from megatrain.tile.formats import NF4
from tests.families.tiny import tiny_model
from tests.inside import program_of, store_of
from tests.parity.cases import (
    assert_step,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    plain_gradients,
    qwen2,
    resumes,
    same,
)
from tests.parity.test_float8 import cosine
from tests.sweeps import few, placements, swept

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MOST = 448.0  # the largest value of e4m3
BASES = ("bf16", "fp8", "nf4")


def adapted(base=llama, **keys):
    """A model whose base is exact in bf16, with a strong adapter."""
    torch.manual_seed(1)
    keys = {
        "r": 4,
        "lora_alpha": 8,
        "init_lora_weights": False,
        "target_modules": "all-linear",
    } | keys
    model = get_peft_model(base(), LoraConfig(**keys))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def by_rows(values):
    """Codes and scales of a matrix: each row's largest value becomes the largest of e4m3."""
    scales = (values.abs().amax(1, keepdim=True) / MOST).float()
    return (values.float() / scales.clamp(min=1e-37)).clamp(-MOST, MOST).to(
        torch.float8_e4m3fn
    ), scales


class Quantised(torch.autograd.Function):
    """The product of a linear module with its input, weight and gradient quantised by rows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.codes, ctx.scales = weight if isinstance(weight, tuple) else by_rows(weight)
        codes, scales = by_rows(x.reshape(-1, x.shape[-1]))
        y = codes.float() @ ctx.codes.float().T * scales * ctx.scales.T
        return y.bfloat16().view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        codes, scales = by_rows((dy.float() * ctx.scales.T).reshape(-1, dy.shape[-1]))
        dx = codes.float() @ ctx.codes.float() * scales
        return dx.bfloat16().view(*dy.shape[:-1], -1), None


class Reference(nn.Module):
    def __init__(self, linear, operand):
        super().__init__()
        self.weight, self.bias = operand, linear.bias

    def forward(self, x):
        y = Quantised.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def reference_gradients(model, step, *, quantised, base="bf16"):
    """Loss and gradients of transformers' model in bf16 with PEFT's adapter."""
    packed = {id(p): by_rows(p.data) for p in model.parameters() if base == "fp8" and p.ndim == 2}
    for parameter in model.parameters():  # buffers stay: the engine keeps angles in fp32, too
        parameter.data = parameter.data.bfloat16()
    layers = model.get_base_model().model.layers
    for module in list(layers.modules()):
        if (inside := getattr(module, "base_layer", None)) is not None:
            if base == "nf4":
                stored = NF4.pack(inside.weight.data.float())
                inside.weight.data = NF4.unpacked(stored, inside.weight.shape).bfloat16()
            if quantised:
                module.base_layer = Reference(inside, packed.get(id(inside.weight), inside.weight))
    return plain_gradients(model.get_base_model(), step)


@swept(together=1, base=BASES, family=[llama, qwen2])
def test_gradients_are_those_of_plain_pytorch_that_quantises_so(family, base):
    """Of one row, whose gradients are rounded to bf16 once, as the engine rounds its sums."""
    [step] = make_batches(1, ((1, 12),))
    engine = make_engine(adapted(family), precision="fp8", base=base, clip=1e9)
    wanted = reference_gradients(adapted(family), step, quantised=True, base=base)
    assert_step(engine, step, wanted, error=1e-30)
    in_bf16 = reference_gradients(adapted(family), step, quantised=False, base=base)[1]
    assert 0.9 < cosine(gradients(engine), in_bf16) < 0.99


@pytest.mark.parametrize("base", few(["fp8", "bf16"]))
def test_no_placement_changes_a_bit(base):
    step, other = make_batches(2)

    def run(**options):
        engine = make_engine(adapted(), precision="fp8", base=base, **options)
        result = engine.step(step)
        return (result.loss, result.grad_norm, engine.evaluate(other)), masters(engine)

    wanted = run()
    for name, placement in placements("float8 base").items():
        numbers, weights = run(placement=placement)
        assert numbers == wanted[0] and same(weights, wanted[1]), name


def test_rows_train_alike_whatever_shares_their_micro_batch():
    """Scales are of one token: its products do not depend on the others."""
    [step] = make_batches(1)
    engine = make_engine(adapted(), precision="fp8")
    alone = torch.cat([engine.logits({"input_ids": row[None]})[0] for row in step[0]["input_ids"]])
    assert torch.equal(engine.logits({"input_ids": step[0]["input_ids"]}).flatten(0, 1), alone)
    assert not program_of(engine).scaled_together


@pytest.mark.parametrize("base", few(BASES))
def test_a_run_is_resumed_to_the_bit(base, tmp_path):
    first, *others = make_batches(3)
    llama().save_pretrained(tmp_path / "base")
    lora = {"r": 4, "target_modules": "all-linear"}
    engine = make_engine(tmp_path / "base", adapter=lora, precision="fp8", base=base)
    engine.step(first)
    resumes(engine, tmp_path / "saved", others)


@pytest.mark.parametrize("base", few(BASES, 1))
def test_a_merged_model_is_the_same_in_either_precision(base, tmp_path):
    """What is merged are the base's values as they rest, never codes of a product."""
    files, options = [], {"base": base, "placement": Placement(resident=("layer 1",))}
    for precision in ("bf16", "fp8"):
        with make_engine(adapted(), precision=precision, **options) as engine:
            engine.evaluate(make_batches(1)[0])
            engine.save_pretrained(tmp_path / precision, merged=True)
        files.append((tmp_path / precision / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_texts_come_of_the_values_that_codes_stand_for():
    """Generation computes in bf16, with the values of a base in float8."""
    ids = torch.arange(20, 26)[None]
    engines = [make_engine(adapted(), precision=p, base="fp8") for p in ("fp8", "bf16")]
    for spare in (0, None):
        logits = []
        for engine in engines:
            with engine.whole_model(spare=spare) as model, torch.no_grad():
                logits.append(model(ids).logits)
        assert torch.equal(*logits)


def test_what_is_no_frozen_linear_module_of_whole_blocks_stays_in_bf16():
    """Adapters, what is trained beside them, routers, stacked experts, and odd sizes."""
    odd = adapted(lambda: llama(intermediate_size=40), modules_to_save=["q_proj"])
    names = {name.split(".layers.")[1] for name in multiplied_of(odd)}
    wanted = {"k_proj.base_layer", "v_proj.base_layer", "o_proj.base_layer"}
    wanted = {f"{n}.self_attn.{name}.weight" for n in range(3) for name in wanted}
    assert {name for name in names if "original_module" not in name} == wanted
    experts = multiplied_of(adapted(lambda: tiny_model("mixtral"), target_modules=["q_proj"]))
    assert experts and not any("experts" in name or "gate" in name for name in experts)


def multiplied_of(model):
    engine = make_engine(model, precision="fp8")
    entries = [entry for _, entry in store_of(engine).entries()]
    return {entry.name for entry in entries if entry.is_operand}


def test_what_has_no_products_in_float8_is_refused():
    refused = {
        "use_dora needs the base's weights": lambda: adapted(use_dora=True),
        r"no nn\.Linear's sizes are multiples": lambda: adapted(
            lambda: tiny_model("gpt2"), target_modules=["c_attn"], fan_in_fan_out=True
        ),
    }
    for said, model in refused.items():
        with pytest.raises(InputError, match=said):
            make_engine(model(), precision="fp8")
