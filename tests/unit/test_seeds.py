"""Seeds of drawn weights and dropout: other values would change every run there is."""

import ast

import pytest
import torch

from megatrain.base.seeds import derived_seed
from tests.structure.source_tree import MODULES, nodes

VALUES = {
    (0,): 4066689987807800415,
    (0, 0): 6113538345208582997,
    (0, 1): 8845802290766231721,
    (1, 0): 3435587645334476312,
    (-1, 3): 7420005760911551600,
    (2**70, 12, 5): 66050740447722534,
}


@pytest.mark.parametrize(("path", "seed"), VALUES.items())
def test_seeds_are_the_same_for_ever(path, seed):
    assert derived_seed(*path) == seed


def test_neighbours_have_seeds_of_their_own_that_torch_takes():
    seeds = [derived_seed(a, b) for a in range(-20, 20) for b in range(40)]
    assert len({seed & (2**32 - 1) for seed in seeds}) == len(seeds)  # torch's CPU generator
    for seed in seeds[:10]:
        torch.Generator().manual_seed(seed)


@pytest.mark.exhaustive
def test_nothing_is_drawn_by_the_interpreter_s_hash():
    """What `hash` gives for numbers and tuples is each interpreter's own, for `__hash__`."""

    def calls(tree):
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "hash"
            for node in tree
        )

    drawing = {
        name
        for name, path in MODULES.items()
        if calls(nodes(path))
        != sum(
            calls(ast.walk(node))
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef) and node.name == "__hash__"
        )
    }
    assert not drawing
