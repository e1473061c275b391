"""What is foretold of a step of ranks, beside what two of them really keep and exchange."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatrain import Placement
from megatrain.device.base import COMPUTE, GATHER, HOSTS, REDUCE
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.model.probe import spec
from megatrain.parallel.distributed import ProcessGroups
from megatrain.source.source import open_source
from tests.families.tiny import tiny_model
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


def of_two_ranks(folder, model, mesh, placement, streams):
    """Of each rank the engine's memory, the collectives of a step, and the rows it exchanges."""

    def work(group):
        mesh_of_ranks = init_device_mesh("cpu", mesh)
        engine = make_engine(model(), group=mesh_of_ranks, placement=placement)
        ids_BT = torch.arange(WHOLE.rows * WHOLE.sequence_length).view(WHOLE.rows, -1) % 128
        micro_batches = ids_BT.split(ROWS)[dist.get_rank() :: 2]
        step = [{"input_ids": ids, "labels": ids} for ids in micro_batches]
        engine.step(step)
        calls: list[tuple[str, float]] = []
        rows: list[int] = []

        def noted(name, note):
            collective = getattr(ProcessGroups, name)

            def call(ranks, values, *sizes):
                note(name, values)
                return collective(ranks, values, *sizes)

            return mock.patch.object(ProcessGroups, name, call)

        def collective(name, values):
            calls.append((streams[name], values.nbytes))

        def exchange(name, values):
            rows.append(values.nbytes * values.is_floating_point())

        with ExitStack() as notes:
            for name in ("all_gather", "reduce_scatter", "all_reduce"):
                notes.enter_context(noted(name, collective))
            notes.enter_context(noted("exchange", exchange))
            engine.step(step)
        return engine.memory(), calls, sum(rows)

    return run_ranks(2, folder, work)


@swept(together=0, layout=[*LAYOUTS], placed=[*PLACEMENTS])
def test_two_ranks_keep_and_exchange_what_is_foretold(layout, placed, tmp_path):
    each, hosts, streams = LAYOUTS[layout]
    placement, workload = PLACEMENTS[placed], WHOLE.shared(each, hosts)
    forecasts = ForecastCache(spec(open_source(llama()).model))
    distinct_U = forecasts.measured(workload).distinct(WHOLE.rows)
    assert len(distinct_U) == 128  # all: each rank keeps as many of the rows that are needed
    machine = replace(small_machine().shared(each, SLOW, SLOW), launch_seconds=0.0)
    found = forecasts.of(machine, placement, workload, ROWS)

    for memory, calls, rows in of_two_ranks(tmp_path, llama, (hosts, each), placement, streams):
        assert of_streams(calls) == foretold(found) and not rows
        for name, num_bytes in found.host_bytes.items():
            if name != "host_process_bytes":
                assert memory[name] == num_bytes, name


def test_ranks_that_own_experts_keep_and_exchange_what_is_foretold(tmp_path):
    """Of experts nothing is gathered; as many rows are exchanged as go to all experts."""
    placement, workload = Placement(slots=2, own_experts=True), WHOLE.shared(2)
    model = partial(tiny_model, "qwen3_moe", changes={"num_experts": 6, "vocab_size": 128})
    forecasts = ForecastCache(spec(open_source(model()).model))
    fast = replace(small_machine().shared(2, 1e9), launch_seconds=0.0)
    found, quick = (
        forecasts.of(machine, placement, workload, ROWS)
        for machine in (replace(fast, link_gbps=SLOW), fast)
    )
    streams = LAYOUTS["two ranks"][2]
    ranks = of_two_ranks(tmp_path, model, (1, 2), placement, streams)
    for memory, calls, _ in ranks:
        assert of_streams(calls) == foretold(found)
        for name, num_bytes in found.host_bytes.items():
            if name != "host_process_bytes":
                assert memory[name] == num_bytes, name
    cut = forecasts.of(replace(fast, link_gbps=SLOW), Placement(slots=2), workload, ROWS)
    experts = sum(e.numel for t in forecasts.model(workload).layouts for e in t.entries
                  if ".experts." in e.name)  # fmt: skip
    less = cut.bounds[GATHER] - found.bounds[GATHER]
    assert less * SLOW * 1e9 == pytest.approx(2 * 4 * experts / 2, rel=0.2)
    exchanging = found.bounds[COMPUTE] - quick.bounds[COMPUTE]
    rows = sum(exchanged for *_, exchanged in ranks)
    assert exchanging * SLOW * 1e9 == pytest.approx(rows / 2 / 2, rel=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_share_rows_attend_over_whole_rows_and_exchange_heads(compiled):
    """Each rank has all tokens for a part of the heads, which it exchanges in both directions."""
    tokens, size = 64, 2
    model, config = spec(llama()), llama().config
    whole = Workload(tokens, tokens, 1, compile=compiled, sequence_ranks=size)
    alone, shared = (
        ForecastCache(model).measured(replace(whole.shared(size), sequence_ranks=ranks)).layer(0, 1)
        for ranks in (1, size)
    )
    assert shared.forward.attention_flops == size * alone.forward.attention_flops > 0
    backward = "attention_backward_flops"
    assert getattr(shared.backward, backward) == size * getattr(alone.backward, backward) > 0
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)  # with results, values
    exchanged = 2 * heads * config.head_dim * tokens // size  # bytes of bf16
    assert alone.forward.exchanged_bytes == alone.backward.exchanged_bytes == 0
    assert shared.forward.exchanged_bytes == shared.backward.exchanged_bytes == exchanged
    assert shared.forward.product_flops == alone.forward.product_flops
    assert model.layers[0].kind.module.self_attn.config._attn_implementation == "sdpa"
