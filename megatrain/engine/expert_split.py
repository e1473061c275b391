"""A layer too large for the device, visited in stages: up to its experts, some experts after the
others, and the layer as a whole with their result.

Each stage passes all micro-batches before the next one's weights are used, as layers do; what it
gives to the next is an activation. In the backward, `After` gives the gradient of the experts'
result, each `Group` those of its weights and of what the experts are given, and `Before` all the
rest in one go: so each weight's gradient is complete after one stage.

What is computed twice for it: in each sweep, all but the experts.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import Kind, Name
from megatrain.engine.batch import Batch
from megatrain.engine.layer import Layer, Stage, Turn
from megatrain.engine.modules import State
from megatrain.engine.saved_tensors import Graph
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.tile_slice import ExpertSlices, TileSlice
from megatrain.model.capture import Ref
from megatrain.model.experts import Chosen, ExpertRows
from megatrain.model.program import Activations, MicroBatch, ModelProgram
from megatrain.placement import Saves

# Leaves beside the layer's outputs: the experts' hidden states, choices and shares; their result.
GIVEN, RESULT = (-1, -2, -3), -4


def staged(
    device: Device, program: ModelProgram, expert_slices: ExpertSlices, visit: int
) -> list[Layer]:
    """The stages of a layer, in their order."""
    after = After(device, program, expert_slices.again, visit)
    groups = [
        Group(device, program, tile_slice, visit, start)
        for tile_slice, start in zip(expert_slices.groups, expert_slices.bounds, strict=False)
    ]
    groups[0].new_inputs = groups[0].inputs
    return [Before(device, program, expert_slices.core, visit, after), *groups, after]


class _AroundExperts(Stage):
    """A stage that runs the layer without its experts."""

    def __init__(
        self, device: Device, program: ModelProgram, tile_slice: TileSlice, visit: int
    ) -> None:
        super().__init__(device, program, tile_slice, visit)
        self.given = [Ref(visit, leaf) for leaf in GIVEN]
        self.result = Ref(visit, RESULT)

    def _call(
        self,
        weights: dict[str, Tensor],
        micro: MicroBatch,
        values: Activations,
        saves: Saves | None = None,
    ) -> Activations:
        result = values.get(self.result)
        made, given = self.program.around_experts(self.visit, weights, micro, values, result)
        return {**made, **dict(zip(self.given, given, strict=True))}


class After(_AroundExperts):
    """Runs the layer's forward with the experts' result given; gives the result's gradient.

    Attributes:
        results: in the backward, the experts' result of each micro-batch, for `Before`.
    """

    def __init__(
        self, device: Device, program: ModelProgram, tile_slice: TileSlice, visit: int
    ) -> None:
        super().__init__(device, program, tile_slice, visit)
        self.inputs = [*self.inputs, self.result]
        self.new_inputs = self.grad_inputs = [self.result]
        self.made = []  # the gradients of what it makes wait for `Before`
        self.results: dict[int, Tensor] = {}

    def begin(self) -> None:
        super().begin()
        self.results.clear()

    def _ready(self, at: Turn, returned: list[Tensor]) -> Graph:
        result = at.values[self.result]
        self.results[at.index] = result.clone()  # it may lie in a lane from the host
        return self._graph(at)[0]


class Before(_AroundExperts):
    """Runs the layer up to its experts; the backward is of all of the layer but the experts."""

    def __init__(
        self, device: Device, program: ModelProgram, tile_slice: TileSlice, visit: int, after: After
    ) -> None:
        super().__init__(device, program, tile_slice, visit)
        self.made = [*self.made, *self.given, self.result]
        self.live_out |= set(self.inputs)
        self.after = after

    def _ready(self, at: Turn, returned: list[Tensor]) -> Graph:
        result = self.after.results.pop(at.index)
        return self._graph(replace(at, values={**at.values, self.result: result}))[0]


class Group(Stage):
    """Some of the layer's experts, for the tokens that chose them."""

    def __init__(
        self, device: Device, program: ModelProgram, tile_slice: TileSlice, visit: int, start: int
    ) -> None:
        """Args: `start` is the number of the first expert of the group."""
        super().__init__(device, program, tile_slice, visit)
        experts = program.spec.layers[visit].kind.experts
        assert experts is not None
        self.prefix += f"{experts.path}."
        self.start, self.stop = start, start + tile_slice.layout.entries[0].shape[0]
        self.inputs, self.new_inputs = [Ref(visit, leaf) for leaf in GIVEN], []
        self.result = Ref(visit, RESULT)

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """The sum of the experts' results so far, beside the other activations."""
        name = Name(Kind.PART, f"{self.name} experts")
        return self.each(name, batch, partial(self.add_results, slot), h, reads=[slot])

    def add_results(self, slot: Buffer, micro: MicroBatch, values: Activations) -> Activations:
        """One micro-batch's activations, with these experts' results added."""
        with torch.no_grad():
            pairs, rows = self._chosen(values)
            total_ND = values.get(self.result)
            if total_ND is None:
                total_ND = torch.zeros_like(values[self.inputs[0]])
            if sum(pairs.counts):
                pairs.add(total_ND, self.program.experts(self.visit, self.weights(slot), rows))
        return {**values, self.result: total_ND}

    def _chosen(self, values: Activations) -> tuple[Chosen, ExpertRows]:
        """The tokens that chose these experts, with each one's row, expert and share."""
        hidden_ND, index_NK, share_NK = (values[ref].detach() for ref in self.inputs)
        pairs = self.program.chosen(self.visit, index_NK, self.start, self.stop)
        where = (pairs.tokens_S, pairs.choices_S)
        return pairs, (hidden_ND[pairs.tokens_S], index_NK[where] - self.start, share_NK[where])

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Accumulate the gradients of the experts and of their inputs."""
        name = Name(Kind.PART_BACKWARD, f"{self.name} experts backward")
        backward = partial(self.add_gradients, slot, accumulator)
        return self.each(name, batch, backward, h, dh, reads=[slot], writes=[accumulator.sums])

    def add_gradients(
        self,
        slot: Buffer,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        values: Activations,
        dh: Activations,
    ) -> Activations:
        """One micro-batch's gradients: of the weights into `accumulator`, of inputs into `dh`."""
        hidden, _, shares = self.inputs
        for ref in (hidden, shares):
            dh.setdefault(ref, torch.zeros_like(values[ref]))
        pairs, (rows_SD, index_S, share_S) = self._chosen(values)
        if self.result not in dh or not sum(pairs.counts):
            return dh
        weights, names = self.leaves(slot)
        inputs = [rows_SD.requires_grad_(), share_S.requires_grad_()]
        with torch.enable_grad():
            made_SD = self.program.experts(self.visit, weights, (rows_SD, index_S, share_S))
        sources = [*inputs, *(weights[name.removeprefix(self.prefix)] for name in names)]
        gradient_SD = dh[self.result][pairs.tokens_S]
        grads = torch.autograd.grad(made_SD, sources, gradient_SD, allow_unused=True)
        pairs.add(dh[hidden], grads[0])
        dh[shares][pairs.tokens_S, pairs.choices_S] = grads[1]
        accumulator.add(names, grads[2:])
        return dh
