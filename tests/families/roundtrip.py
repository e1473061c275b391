"""Whether a run goes on from its checkpoint as if it had not ended, for one model at a time.

A run is saved after a step and takes another; a process that has never seen the model loads the
checkpoint and takes the same one. Losses, norms and masters must be the same bits.
"""

import atexit
import copy
import multiprocessing
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, InputError
from megatrain.model.build import loaded_types
from tests.families.plain import LR, Results, Step, accumulate, go_on, make_steps

EXACT, WRONG = "exact", "wrong"
WAYS = ("module", "bf16 module", "cast module")


def runs_in_bf16(model: PreTrainedModel) -> bool:
    """Whether plain transformers can compute the model in bf16, loss and gradients."""
    types = loaded_types(model, torch.bfloat16)
    model = copy.deepcopy(model).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(types[name])
    try:
        accumulate(model, make_steps(model.config)[0])
    except RuntimeError:
        return False
    return True


def round_trips(model: PreTrainedModel) -> dict[str, str]:
    """How each of `WAYS` to give a float32 model to an engine fares: exact, refused, or wrong.

    Those in bf16 only where transformers' own code runs in it. `folders` tries those from folders.
    """
    ways = WAYS if runs_in_bf16(model) else WAYS[:1]
    with TemporaryDirectory() as folder:
        return {way: round_trip(model, way, Path(folder) / way.replace(" ", "-")) for way in ways}


def summary(trips: dict[str, str]) -> str:
    """In a few words: what is exact, and what is not."""
    other = [f"{way} {text.split(':')[0]}" for way, text in trips.items() if text != EXACT]
    return "; ".join(other if len(other) == len(trips) else [EXACT, *other])


def round_trip(model: PreTrainedModel, way: str, place: Path) -> str:
    """`exact`; `refused: ...` if the engine does not take the model; or what is wrong."""
    first, then, _ = [[step[0]] for step in make_steps(model.config)]
    try:
        engine = Engine(
            _given(model, way, place / "model"),
            optimizer=AdamW(lr=LR),
            precision="fp32" if way == "module" else "bf16",
            device="cpu",
        )
    except InputError as refusal:
        return f"refused: {refusal}"
    with engine:
        engine.step(first)
        return goes_on(engine, then, place / "saved")


def goes_on(engine: Engine, step: Step, saved: Path) -> str:
    """`exact` if another process takes the engine's next step from its checkpoint; what is wrong.

    The checkpoint stays in `saved`.
    """
    engine.save(saved)
    wanted = go_on(engine, [step])
    try:
        losses, masters = _another_process().apply(_load, (saved, [step]))
    except InputError as refusal:
        return f"{WRONG}: saved, but not loaded: {refusal}"
    if losses != wanted[0]:
        return f"{WRONG}: {losses} instead of {wanted[0]}"
    other = [name for name, value in wanted[1].items() if not torch.equal(masters[name], value)]
    return f"{WRONG}: {other[0]} differs" if other else EXACT


def _given(model: PreTrainedModel, way: str, folder: Path) -> PreTrainedModel:
    if way == "module":
        return model
    given = copy.deepcopy(model).to(torch.bfloat16)
    if way == "cast module":
        return given
    given.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype="auto")


def _load(folder: Path, steps: list[Step]) -> Results:
    with Engine.load(folder, device="cpu") as engine:
        return go_on(engine, steps)


@cache
def _another_process() -> Any:
    """One that loads for all: it makes no model but from a checkpoint."""
    pool = multiprocessing.get_context("spawn").Pool(1, quiet)
    atexit.register(pool.terminate)
    return pool


def quiet() -> None:
    """Let a process say nothing, and make sums independent of the number of cores."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
