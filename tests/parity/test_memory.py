"""Host memory: what each plane takes. What loading takes is in `checkpoint/test_memory.py`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import Placement
from megatrain.device import CpuDevice
from megatrain.optim import parameter_bytes
from megatrain.source import source
from tests.families.tiny import decoder_sizes
from tests.parity.cases import frozen, in_dtype, llama, make_batches, make_engine
from tests.rules import SWEPT
from tests.sweeps import few

# Large enough that the padding of planes and rows of text are as little as in a real model.
MID = LlamaConfig(**decoder_sizes(16384, 384, 1024, 5, 6, 2))
SPARE = 0.005  # of the planes: alignment of parameters and pages


@pytest.fixture(scope="module")
def mid():
    """With its weights, which not each engine need draw."""
    return LlamaForCausalLM(MID)


def bytes_per_parameter(engine):
    memory = engine.memory()
    return {
        name.removeprefix("host_").removesuffix("_bytes"): num_bytes / engine.num_parameters
        for name, num_bytes in memory.items()
        if name.startswith("host_")
    }


# Of a rule and a precision: bytes of weights, remainder, moments and gradients.
PLANES = [
    ("adamw", "bf16", (2, 2, 8, 2)),
    ("adamw", "fp32", (4, 0, 8, 4)),
    ("adamw bf16", "bf16", (2, 2, 4, 2)),
    ("adamw int8", "bf16", (2, 2, 2.125, 2)),
    ("adamw int8", "fp32", (4, 0, 2.125, 4)),
    ("lion", "bf16", (2, 2, 4, 2)),
    ("sgd plain", "bf16", (2, 2, 0, 2)),
    ("lion", "fp32", (4, 0, 4, 4)),
]


@pytest.mark.parametrize(("rule", "precision", "planes"), few(PLANES, 0, 3))
def test_bytes_per_parameter(mid, rule, precision, planes):
    engine = make_engine(mid, precision=precision, rule=rule)
    assert parameter_bytes(SWEPT[rule](), source.DTYPES[precision]) == sum(planes)
    assert engine.num_parameters > 19e6
    found = bytes_per_parameter(engine)
    names = ("weights", "remainder", "moments", "gradients")
    for plane, expected in zip(names, planes, strict=True):
        assert found[plane] == pytest.approx(expected, rel=SPARE), plane
    assert found["bytes"] == pytest.approx(sum(planes), rel=SPARE)
    assert found["bytes"] == pytest.approx(sum(v for k, v in found.items() if k != "bytes"))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_frozen_parameter_is_its_weights_alone(source):
    """And the bits that bf16 does not hold, if it came with them."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = frozen(in_dtype(llama(**sizes), source), lambda name: ".1." in name)
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / model.num_parameters()
    found = bytes_per_parameter(make_engine(model, precision="bf16"))
    assert found["moments"] == pytest.approx(8 * share, rel=0.01)
    assert found["gradients"] == pytest.approx(2 * share, rel=0.01)
    assert found["weights"] == pytest.approx(2, rel=0.01)
    rest = 2 if source == torch.float32 else 2 * share
    assert found["remainder"] == pytest.approx(rest, rel=0.01)


class CountingDevice(CpuDevice):
    """Counts the host memory that it has given and not got back."""

    def __init__(self):
        self.rooms: dict[int, int] = {}

    def host(self, *arguments, **settings):
        buffer = super().host(*arguments, **settings)
        self.rooms[buffer.data.data_ptr()] = buffer.data.nbytes
        return buffer

    def free(self, buffer):
        del self.rooms[buffer.data.data_ptr()]


def test_rooms_that_are_outgrown_are_given_back():
    """Rows that grow step by step would else pin ever more memory."""
    device = CountingDevice()
    engine = make_engine(llama(), placement=Placement(layer_inputs="host"), device=device)
    fixed = sum(device.rooms.values())
    for tokens in range(4, 60, 8):
        engine.step(make_batches(1, ((2, tokens),))[0])
        memory = engine.memory()
        declared = memory["host_rows_bytes"] + memory["host_boundaries_bytes"]
        assert sum(device.rooms.values()) - fixed == declared
