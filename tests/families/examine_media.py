"""How a multimodal family fares: on text alone, and on its own media."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, InputError
from megatrain.compat.transformers import encoders
from megatrain.model.trained import Trained
from tests.families.examine import NOT_TRAINED, PASSES, REFUSED, WRONG
from tests.families.folders import export_failures
from tests.families.media import UNTRIED, media_steps
from tests.families.parity import Errors, compare
from tests.families.plain import EPS, LR, Step
from tests.families.roundtrip import EXACT, goes_on
from tests.families.tiny import tiny_multimodal

TEXT_ALONE, NOT_TRIED = "text alone", "not tried"


@dataclass
class MediaDiagnostic:
    """How a family fares.

    Attributes:
        result: passes, text alone, refused, not trainable, not tried, or wrong.
        reason: for all but the first; `all_trained`: for not training the encoders, too.
        media: names of the tensors of the micro-batches with media.
        errors: with the encoders frozen; `trained`: with all trained.
        round_trip: a checkpoint goes on, and a folder comes out, to the bit.
    """

    name: str
    result: str
    reason: str = ""
    media: list[str] = field(default_factory=list)
    errors: Errors = field(default_factory=Errors)
    trained: Errors = field(default_factory=Errors)
    all_trained: str = ""
    round_trip: bool = False


def examine_media(family: str, *, quick: bool = False) -> MediaDiagnostic:
    """Try a family; `quick`: not with its encoders trained."""
    if family in UNTRIED:
        return MediaDiagnostic(family, NOT_TRIED, UNTRIED[family])
    try:
        model = tiny_multimodal(family)
    except ImportError as error:
        missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", str(error))
        assert missing is not None
        package = missing.group(1) or missing.group(2)
        return MediaDiagnostic(family, NOT_TRAINED, f"needs the package {package}: install it")
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return MediaDiagnostic(family, NOT_TRIED, f"no tiny model of it: {_line(error)}")
    try:
        Engine(model, optimizer=AdamW(), precision="fp32", device="cpu").close()
    except InputError as refusal:
        return MediaDiagnostic(family, REFUSED, str(refusal))
    try:
        steps = media_steps(model, family)
    except Exception as error:  # a forward may fail in any way on tensors of other shapes
        return MediaDiagnostic(family, NOT_TRIED, f"no micro-batch for it: {_line(error)}")
    found = MediaDiagnostic(family, PASSES, media=[n for n in steps[0][0] if n not in steps[0][1]])
    try:
        found.errors = compare(model, steps=steps, chosen=Trained())
    except InputError as refusal:
        found.result, found.reason = TEXT_ALONE, str(refusal)
        return found
    failures = found.errors.failures + round_trip(model, steps)
    found.round_trip = True
    if not quick:
        try:
            found.trained = compare(model, steps=steps, chosen=Trained(train_only=["."]))
        except InputError as refusal:
            found.all_trained = str(refusal)
        failures += found.trained.failures
    if failures:
        found.result, found.reason = WRONG, "; ".join(failures)
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:150].replace("|", "/")


def round_trip(model: PreTrainedModel, steps: list[Step]) -> list[str]:
    """What is wrong with a checkpoint, or with an export, of a run from the model's folder."""
    rule = AdamW(lr=LR, eps=EPS)
    with TemporaryDirectory() as place:
        folder, export, saved = (Path(place) / name for name in ("folder", "export", "saved"))
        model.save_pretrained(folder)
        with Engine(folder, optimizer=rule, precision="fp32", device="cpu") as engine:
            engine.step(steps[0])
            trip = goes_on(engine, steps[2], saved)
            engine.save_pretrained(export)
        new = type(model).from_pretrained(export, dtype=torch.float32)
        frozen = {weight for encoder in encoders(model) for weight in encoder.parameters()}
        named = model.named_parameters()
        still = {name for name, p in named if p in frozen or not p.requires_grad}
        still |= {name for name, _ in model.named_buffers()}
        failures = export_failures(folder, export, model, new, still)
    return failures if trip == EXACT else [*failures, trip]
