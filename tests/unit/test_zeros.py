"""Learning a large model's structure takes neither its memory nor its time."""

import psutil
import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config

from megatrain.cli.shapes import qwen2_config
from megatrain.model import zeros
from megatrain.model.probe import spec
from megatrain.model.zeros import ZeroProducts, zero_pages
from megatrain.source.source import open_source
from megatrain.telemetry.host import peak_process_bytes


def test_zeros_are_zero_and_take_no_memory():
    before = psutil.Process().memory_info().rss
    zeros = zero_pages((1 << 14, 1 << 14), requires_grad=True)
    assert zeros.is_leaf and zeros.requires_grad and zeros.shape == (1 << 14, 1 << 14)
    assert not torch.count_nonzero(zeros.detach())
    assert psutil.Process().memory_info().rss - before < 100 << 20  # of 1 GiB
    assert torch.equal(zero_pages((2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("bias", [None, torch.arange(3.0)])
def test_products_with_zeros_are_what_torch_computes(bias):
    """Where the input is not finite, too; other weights are multiplied as ever."""
    nothing, ones = zero_pages((3, 4)), torch.ones(3, 4)
    x = torch.tensor([[1.0, 2, 3, 4], [1, torch.nan, 3, 4], [torch.inf, 2, 3, 4]])[None]
    for weight in (nothing, ones):
        real = F.linear(x, weight, bias)
        with ZeroProducts([nothing]):
            found = F.linear(x, weight, bias)
        torch.testing.assert_close(found, real, rtol=0, atol=0, equal_nan=True)
        assert found.is_contiguous()


def test_the_structure_of_a_layer_is_learned_without_its_products(monkeypatch):
    source, computed = open_source(qwen2_config("0.5b", layers=1)), zeros._product_with_zeros
    spared = list[str]()

    def product(rows, x, weight, bias):
        spared.extend(["x".join(map(str, weight.shape))] * (not rows))
        return computed(rows, x, weight, bias)

    monkeypatch.setattr(zeros, "_product_with_zeros", product)
    [layer] = spec(source.model).layers
    weights = ["x".join(map(str, p.shape)) for p in layer.module.parameters() if p.dim() == 2]
    assert len(spared) == 7 and sorted(spared) == sorted(weights)


def test_the_structure_of_72_billion_parameters_is_learned_in_little_memory():
    source = open_source(qwen2_config("72b"))
    before = peak_process_bytes()  # of less than 4 GiB
    assert len(spec(source.model).layers) == 80
    assert peak_process_bytes() - before < 1 << 30  # 12 GiB with zeros that are written


@pytest.mark.exhaustive
def test_experts_larger_than_this_machines_memory_are_no_hindrance():
    config = DeepseekV3Config(
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4096, vocab_size=128
    )
    found = spec(open_source(config).model)
    experts = 4096 * 3 * config.moe_intermediate_size * config.hidden_size
    assert sum(p.numel() for p in found.capture.model.parameters()) > experts
    assert 4 * experts > psutil.virtual_memory().total  # 672 GiB
