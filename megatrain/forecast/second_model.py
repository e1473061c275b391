"""What a frozen model takes that is streamed beside the one that is trained, before each step.

A reference or a teacher: an engine of its own, whose forward alone runs. Its seconds are those of
its layers and head as steps count them, or of its weights over the bus, whichever are more.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from megatrain.forecast.cost_model import CostModel, link_gbps, network_gbps
from megatrain.forecast.needs import Needs, needs_of
from megatrain.forecast.profile import Profile
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.model.program import ModelProgram
from megatrain.model.spec import ModelSpec
from megatrain.placement import Placement
from megatrain.source.source import Model
from megatrain.tile import TileKind


def second_needs(spec: ModelSpec, dtype: torch.dtype, tokens: int, ranks: int = 1) -> Needs:
    """What an engine takes that only runs the model, in steps of so many tokens.

    Args: `ranks`: that share it; then both are of one of them.
    """
    program = ModelProgram(spec, torch.device("cpu"), dtype)
    model = Model.trained(spec, None, ranks)
    every = tokens * ranks  # each has the table's rows for the tokens of all
    return needs_of(model, program, Placement(), clip=False, tokens=every)


def second_seconds(
    spec: ModelSpec, measured: Profile, found: Forecast, workload: Workload
) -> float:
    """Seconds of one forward over all tokens of a step, in the step's micro-batches.

    Args:
        measured: of this model, for rows and a type as the step has them.
        workload: of one rank. The ranks of all hosts share it: of each its part of the weights
            crosses the bus, the others' of its host the link between them, and those of other
            hosts the network, once for all ranks of a host.
    """
    layouts, machine = Model.trained(spec, None).layouts, found.machine
    rows, costs = found.micro_batch, CostModel(machine)
    count = -(-found.tokens_per_step // (rows * found.sequence_length))
    every = [measured.layer(visit, rows).forward for visit in range(len(spec.layers))]
    every += [
        measured.head_losses(each, rows, Placement().head_tokens)
        for each in layouts
        if each.kind is TileKind.HEAD
    ]
    computed = count * sum(map(costs.seconds, every))
    streamed = [each.numel for each in layouts if each.kind in (TileKind.LAYER, TileKind.HEAD)]
    ranks, sharing = workload.ranks, workload.all_ranks
    own = sum(streamed) * measured.dtype.itemsize / sharing
    copied = own / (machine.to_device_gbps * 1e9)
    linked = own * (sharing - 1) * (ranks > 1) / (link_gbps(machine) * 1e9)
    sent = own * (workload.hosts - 1) / (network_gbps(machine, ranks) * 1e9)
    return max(computed, copied, linked, sent)


def with_second(
    found: Forecast, name: str, needs: Needs, seconds: Callable[[], float] = lambda: 0.0
) -> Forecast:
    """The forecast of a step beside which another model is there all of the time."""
    device, host = {name: sum(needs.device.values())}, {name: sum(needs.host.values())}
    if found.machine.unified:
        device, host = {}, dict(Counter(device) + Counter(host))
    named = {f"host_{each.replace(' ', '_')}_bytes": size for each, size in host.items()}
    return replace(
        found,
        seconds=found.seconds + seconds(),
        device_bytes=found.device_bytes | device,
        host_bytes=found.host_bytes | named,
    )
