"""Where a graph finds what it saved again."""

import torch

from megatrain.engine.saved_tensors import OffloadPlan, SavedTensors
from megatrain.model.capture import Ref

REF = Ref(0, 0)


def test_views_of_weights_inputs_and_results_are_found_in_other_places():
    weights, whole = torch.arange(64.0), torch.randn(4, 6)
    entering = whole[1:3]  # of something larger
    leaving = OffloadPlan()
    held = SavedTensors(weights[8:32], {REF: entering}, [], leaving)
    made = torch.randn(5, 7)
    saved = [weights[8:24].view(4, 4).t(), entering[:, 2:], made[1:, ::2], made.t(), whole[3]]
    wanted = [tensor.clone() for tensor in saved]
    packed = [held._pack(tensor) for tensor in saved]
    assert len(leaving.memory) == 2  # what was made, and what lies beside the input
    back = [memory.clone() for memory in leaving.memory]
    there, here = torch.zeros(100), entering.clone()
    there[50:74] = weights[8:32]
    held.let_go()
    weights.zero_()
    made.zero_()
    whole.zero_()
    held.give_back(there[50:74], {REF: here}, back)
    for before, view in zip(wanted, packed, strict=True):
        found = held._unpack(view)
        assert torch.equal(found, before)
    assert held._unpack(packed[0]).stride() == (1, 4)


def test_other_arguments_stay_where_they_are():
    table, made = torch.randn(3), torch.randn(3)
    held = SavedTensors(torch.zeros(1), {}, [table, "no tensor"], OffloadPlan())
    assert held._unpack(held._pack(table)).data_ptr() == table.data_ptr()
    staying = SavedTensors(torch.zeros(1), {}, [], None)
    assert staying._unpack(staying._pack(made)).data_ptr() == made.data_ptr()
