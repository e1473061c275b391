"""Everything that docs/models.md says of a family, found out by trying it."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.model.build import loaded_types
from megatrain.model.spec import ModelSpec
from megatrain.model.unsupported import refuse_rounding
from megatrain.source.source import open_source, structure
from tests.families.folders import FromFolder
from tests.families.parity import Errors, compare
from tests.families.plain import make_steps
from tests.families.roundtrip import runs_in_bf16
from tests.families.tiny import NOT_TRAINABLE, tiny_model

PASSES, REFUSED, NOT_TRAINED, WRONG = "passes", "refused", "not trainable", "wrong"
BF16_TOLERANCE = 0.05

# Everything that a placement can change on a CPU, at once; without clipping updates begin early.
OTHER_PLACEMENT = Placement(slots=3, layer_inputs="host", save_activations=2, head_tokens=5)


@dataclass
class Diagnostic:
    """How a family fares.

    Attributes:
        result: one of the four above.
        reason: why it is refused or not trainable, or what is wrong.
        errors: against plain torch, in fp32.
        folder: how it fares from folders; left to whoever tries that (`folders.py`).
        bf16: relative difference of a bf16 step's loss from the fp32 one's; None if transformers'
            own code for the model does not run in bf16.
        layers: where the streamed layers are, how many, and of how many kinds.
        tied: the head's weights are the embedding's.
        notes: what else a user should know.
        resume: how a run goes on from its checkpoint (see `roundtrip`); tried for the report only.
    """

    name: str
    result: str
    reason: str = ""
    errors: Errors = field(default_factory=Errors)
    bf16: float | None = None
    layers: str = ""
    tied: bool = False
    notes: list[str] = field(default_factory=list)
    folder: FromFolder = field(default_factory=FromFolder)
    resume: str = ""


def examine(family: str, changes: dict | None = None, name: str = "") -> Diagnostic:
    """Try a family (or a variant of it, with `changes` to its configuration)."""
    name = name or family
    if family in NOT_TRAINABLE:
        return Diagnostic(name, NOT_TRAINED, NOT_TRAINABLE[family])
    model = tiny_model(family, changes=changes)
    steps = make_steps(model.config)
    try:
        source = open_source(model)
        errors = compare(source, steps=steps)
        other = compare(model, OTHER_PLACEMENT, max_grad_norm=None, steps=steps[:2])
    except InputError as refusal:
        return Diagnostic(name, REFUSED, str(refusal))
    found = structure(source)
    notes = _notes(model, found)
    problems = [*errors.failures, *(f"placed otherwise, {text}" for text in other.failures)]
    bf16 = None
    try:
        refuse_rounding(loaded_types(model, torch.bfloat16), found.gathered, torch.bfloat16)
    except InputError as refusal:
        notes.append(f"bf16 is refused: {refusal}")
    else:
        if runs_in_bf16(model):
            with Engine(source, optimizer=AdamW(), precision="bf16", device="cpu") as engine:
                loss = engine.step(steps[0]).loss
            bf16 = abs(loss - errors.first) / abs(errors.first)
            if not bf16 <= BF16_TOLERANCE:
                problems.append(f"bf16 loss off by {bf16:.1e}")
        else:
            notes.append("transformers' own code for it does not run in bf16")
    stack, kinds = found.layers[0].name.rpartition(".")[0], {id(e.kind) for e in found.layers}
    layers = f"{stack} ({len(found.layers)}, {len(kinds)} kind{'s' * (len(kinds) > 1)})"
    return Diagnostic(
        name,
        WRONG if problems else PASSES,
        "; ".join(problems),
        errors,
        bf16,
        layers,
        bool(set(found.gathered) & set(found.epilogue)),
        notes,
    )


def _notes(model: PreTrainedModel, found: ModelSpec) -> list[str]:
    notes = []
    if found.unused or found.fixed:
        count = len(found.unused) + len(found.fixed)
        notes.append(f"text gives {count} parameters no gradient: left alone")
    frozen = sum(not p.requires_grad for p in model.parameters())
    if frozen:
        notes.append(f"{frozen} parameters frozen by the class")
    if found.label_shift == 0:
        notes.append("its own loss does not shift labels: give them shifted")
    if len(found.prologue_outputs) > 1:
        notes.append("layers have arguments with gradients of their own")
    if any(ref.visit >= 0 and ref.leaf > 0 for layer in found.layers for ref in layer.inputs):
        notes.append("layers hand on more than the hidden state")
    return notes
