"""What is foretold of a step of ranks, beside what two of them really keep and exchange."""

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatrain import Placement
from megatrain.device.base import GATHER, HOSTS, REDUCE
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.model.probe import spec
from megatrain.parallel.distributed import ProcessGroups
from megatrain.source.source import open_source
from tests.parity.cases import llama, make_engine
from tests.parity.ranks import run_ranks
from tests.sweeps import swept
from tests.unit.forecast_cases import small_machine

WHOLE = Workload(tokens_per_step=1024, sequence_length=64, precision="fp32", compile=False)
ROWS = 4  # of a micro-batch
SLOW = 1e-3  # GB/s: next to what the link takes, nothing else counts

# Ranks of a host, hosts, and the stream of each of ProcessGroups' collectives.
LAYOUTS: dict[str, tuple[int, int, dict[str, str]]] = {
    "two ranks": (2, 1, {"all_gather": GATHER, "reduce_scatter": REDUCE, "all_reduce": REDUCE}),
    "two hosts": (1, 2, {"all_reduce": HOSTS}),
}
PLACEMENTS = {
    "streamed": Placement(slots=2),
    "rows that are not kept, boundaries on the host": Placement(
        slots=2, keep_rows=False, layer_inputs="host"
    ),
}


def of_streams(calls):
    """Of each stream the number and the bytes of its collectives."""
    return {
        stream: (len(sizes), round(sum(sizes)))
        for stream in (GATHER, REDUCE, HOSTS)
        for sizes in [[size for name, size in calls if name == stream]]
    }


def foretold(found):
    """Bytes from seconds: a rank receives half of what two have, and twice that of sums of hosts.

    The few numbers of a step (loss, squares) are priced as a gather, whatever sums them.
    """
    return of_streams([
        (span.stream, span.seconds * SLOW * 1e9 * (1 if span.name.endswith("of all hosts") else 2))
        for span in found.spans
        if span.stream in (GATHER, REDUCE, HOSTS)
    ])  # fmt: skip


@swept(together=0, layout=[*LAYOUTS], placed=[*PLACEMENTS])
def test_two_ranks_keep_and_exchange_what_is_foretold(layout, placed, tmp_path):
    each, hosts, streams = LAYOUTS[layout]
    placement, workload = PLACEMENTS[placed], WHOLE.shared(each, hosts)
    forecasts = ForecastCache(spec(open_source(llama()).model))
    ids_BT = torch.arange(WHOLE.rows * WHOLE.sequence_length).view(WHOLE.rows, -1) % 128
    distinct_U = forecasts.measured(workload).distinct(WHOLE.rows)
    assert len(distinct_U) == 128  # all: each rank keeps as many of the rows that are needed
    machine = replace(small_machine().shared(each, SLOW, SLOW), launch_seconds=0.0)
    found = forecasts.of(machine, placement, workload, ROWS)

    def work(group):
        mesh = init_device_mesh("cpu", (hosts, each))
        engine = make_engine(llama(), group=mesh, placement=placement)
        micro_batches = ids_BT.split(ROWS)[dist.get_rank() :: 2]
        step = [{"input_ids": ids, "labels": ids} for ids in micro_batches]
        engine.step(step)
        calls: list[tuple[str, float]] = []

        def noted(name):
            collective = getattr(ProcessGroups, name)

            def call(ranks, values):
                calls.append((streams[name], values.nbytes))
                collective(ranks, values)

            return mock.patch.object(ProcessGroups, name, call)

        with noted("all_gather"), noted("reduce_scatter"), noted("all_reduce"):
            engine.step(step)
        return engine.memory(), calls

    for memory, calls in run_ranks(2, tmp_path, work):
        assert of_streams(calls) == foretold(found)
        for name, num_bytes in found.host_bytes.items():
            if name != "host_process_bytes":
                assert memory[name] == num_bytes, name
