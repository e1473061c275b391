"""Models and a machine for tests of forecasts."""

from functools import cache

from transformers import LlamaConfig, MixtralConfig

from megatrain.base.units import GIB
from megatrain.machine import Machine
from megatrain.model.probe import spec
from megatrain.model.spec import ModelSpec
from megatrain.source.source import open_source
from tests.families.tiny import decoder_sizes

# What benchmarks/results/step-*.json were taken on.
H200 = Machine(
    name="H200, 16 cores",
    device_memory_bytes=150_109_880_320,
    device_context_bytes=840 << 20,
    host_memory_bytes=135_148_564_480,
    cores=16,
    matmul_tflops=690.0,
    attention_forward_tflops=500.0,
    attention_backward_tflops=400.0,
    device_gbps=4000.0,
    to_device_gbps=55.5,
    from_device_gbps=55.4,
    update_gbps=118.6,
    disk_write_gbps=None,
    launch_seconds=5e-6,
    measured=True,
)


def tiny_config(layers: int = 6, tied: bool = False) -> LlamaConfig:
    """A model that runs anywhere, with layers of 0.8 M parameters."""
    return LlamaConfig(
        **decoder_sizes(512, 256, 768, layers, 4, 2),
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )


@cache
def tiny_spec(layers: int = 6, tied: bool = False) -> ModelSpec:
    return spec(open_source(tiny_config(layers, tied)).model)


def wide_config(tied: bool = False) -> LlamaConfig:
    """The same with 8192 tokens: a head of 2.1 M parameters."""
    config = tiny_config(layers=2, tied=tied)
    config.vocab_size = 8192
    return config


@cache
def wide_spec(tied: bool = False) -> ModelSpec:
    return spec(open_source(wide_config(tied)).model)


def experts_config() -> MixtralConfig:
    """The same with twelve experts, of 0.2 M parameters each, in a layer."""
    config = tiny_config(layers=3).to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    heads = ("num_attention_heads", "num_key_value_heads")
    kept = {name: config[name] for name in (*names, *heads)}
    return MixtralConfig(**kept, intermediate_size=256, num_local_experts=12)


@cache
def experts_spec() -> ModelSpec:
    return spec(open_source(experts_config()).model)


def small_machine(device_mib: float = 1e9, host_gib: float = 1e6) -> Machine:
    """Slow enough that every resource matters to a tiny model; launches take no time."""
    return Machine(
        **H200.as_dict()
        | {
            "device_memory_bytes": int(device_mib * 2**20),
            "device_context_bytes": 0,
            "host_memory_bytes": int(host_gib * GIB),
            "matmul_tflops": 1.0,
            "attention_forward_tflops": 1.0,
            "attention_backward_tflops": 1.0,
            "device_gbps": 50.0,
            "to_device_gbps": 2.0,
            "from_device_gbps": 2.0,
            "update_gbps": 4.0,
            "launch_seconds": 0.0,
        }
    )
