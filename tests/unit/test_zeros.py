"""Learning a large model's structure takes neither its memory nor its time."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.options import peak_process_bytes
from megatrain.cli.models import qwen2_config
from megatrain.model.probe import spec
from megatrain.model.zeros import ZeroProducts, zero_pages
from megatrain.source.source import open_source


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


def test_the_structure_of_72_billion_parameters_is_learned_in_little_memory():
    source = open_source(qwen2_config("72b"))
    before = peak_process_bytes()  # of less than 4 GiB
    assert len(spec(source.model).layers) == 80
    assert peak_process_bytes() - before < 1 << 30  # 12 GiB with zeros that are written
