"""Several ranks make a part of the replies each, which are those that one rank makes."""

import itertools
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig

from megatrain import DoesNotFit, Placement, RunFailed
from megatrain.generate import Sampling, continued
from tests.families.tiny import tiny_model
from tests.forks import end
from tests.inside import spec_of
from tests.parity.cases import make_engine
from tests.parity.ranks import run_ranks

FEW = ("llama", "gpt2", "mixtral", "recurrent_gemma")  # of the last, lengths stay apart
MORE = (*FEW, "gemma2", "gemma3_text", "mamba", "falcon_h1", "deepseek_v3", "bloom", "qwen3")
DRAWN = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "seed": 3}
IDS = [torch.arange(3, 3 + count).tolist() for count in (5, 2, 5, 2, 4, 2, 5)]


@contextmanager
def counted(engine):
    """The rows of each forward of the whole model."""
    model, rows = spec_of(engine).capture.model, list[int]()
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield rows
    hook.remove()


@pytest.mark.parametrize(
    ("size", "families"),
    [(2, FEW), *(pytest.param(n, MORE, marks=pytest.mark.exhaustive) for n in (3, 4))],
    ids=["2", "3 exhaustive", "4 exhaustive"],
)
@pytest.mark.exhaustive
def test_ranks_make_a_part_of_the_replies_each(size, families, tmp_path):
    """Token for token, some ended early; the last batch has a single row."""

    def work(group):
        found = []
        for family, how in itertools.product(families, ({"temperature": 0}, DRAWN)):
            placement = Placement(slots=2, keep_weights=1, resident=("layer 0",))
            engine = make_engine(tiny_model(family), group=group, placement=placement)
            given: dict[str, Any] = {"pad": 0, "batch_size": 3, "apart": True}
            sampling = Sampling(max_new_tokens=12, **how)
            with counted(engine) as forwards:
                made = continued(
                    engine, IDS, sampling, GenerationConfig(), stops={*range(9)}, **given
                )
            found.append((made, forwards))
        return found

    alone = work(None)
    assert any(0 < len(each) < 12 for made, _ in alone for each in made)
    together = run_ranks(size, tmp_path, work)
    for found in together:
        assert [made for made, _ in found] == [made for made, _ in alone]
        assert [forwards for _, forwards in found] == [forwards for _, forwards in together[0]]
    for (_, one), (_, several) in zip(alone, together[0], strict=True):
        assert max(one) == 3 and max(several) == -(-3 // size)


def test_a_rank_that_ends_or_has_no_room_between_two_tokens_ends_all(tmp_path):
    def work(group):
        engine = make_engine(tiny_model("llama"), group=group, placement=Placement())
        given: dict[str, Any] = {"stops": set(), "pad": 0, "batch_size": 8, "apart": True}
        made, rank = [engine, IDS, Sampling(max_new_tokens=9), GenerationConfig()], dist.get_rank()

        def full(*needed):
            if rank:
                raise DoesNotFit("no room for keys and values")

        with (
            mock.patch("megatrain.generate.texts.check_cache", full),
            pytest.raises(DoesNotFit, match="no room") as refused,
        ):
            continued(*made, **given)
        assert refused.value.by_all
        with counted(engine) as forwards:

            def ends(module, given):
                if rank and len(forwards) == 6:
                    end()

            spec_of(engine).capture.model.register_forward_pre_hook(ends)
            with pytest.raises(RunFailed, match="rank 0 of 2 has lost the others") as lost:
                continued(*made, **given)
        assert not lost.value.by_all
        end()

    run_ranks(2, tmp_path, work, whole=False)
