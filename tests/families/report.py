"""Writes docs/models.md: `python -m tests.families.report` tries every family."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import media
from tests.families.examine import (
    BF16_TOLERANCE,
    NOT_TRAINED,
    PASSES,
    REFUSED,
    WRONG,
    Diagnostic,
    examine,
    single_threaded,
)
from tests.families.examine_media import (
    NOT_TRIED,
    TEXT_ALONE,
    MediaDiagnostic,
    examine_media,
)
from tests.families.folders import from_folders
from tests.families.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE
from tests.families.roundtrip import round_trips, summary
from tests.families.sizes import VARIANTS
from tests.families.tiny import families, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
WORKERS = 2
MEDIA_TITLE = "## Images and sound"

HEAD = f"""\
# Models

Written by `make models`, which tries each of the {{count}} causal-language-model families of
transformers {{version}}. **{{passing}} train as in plain PyTorch**, {{refused}} are refused with a
reason, and {{untrained}} cannot be trained on text by PyTorch itself.

Older versions work from transformers 5.6 on. 5.6.0 knows 153 of these families: 146 come out as
here, `cpmant` (before 5.17) and `jamba` (before 5.15, unless its configuration has
`use_mamba_kernels: false`) are refused, `ctrl` fails in bf16, the others fail in plain PyTorch,
too. `make compat` runs the parity core with 5.6.0 and torch 2.10. Versions before that do not say
how they have converted the names of stored weights.

## What "passes" means

A tiny random model of the family (3 to 6 layers, one of each kind that the family has, its own
choices of activation, norm, tying, attention pattern) takes three AdamW steps with clipping, of
three micro-batches each that differ in rows and tokens, with padding and ignored labels; once by
the engine and once by plain torch, in fp32 on a CPU.

- **loss**: the largest relative error of a step's loss; at most {LOSS_TOLERANCE:.0e}, or after the
  first step what torch does not determine (see **open**).
- **own loss**: the relative error of a micro-batch's loss by what the model's own forward makes of
  the labels (`.loss`); at most {LOSS_TOLERANCE:.0e}.
- **update**: the largest error of any parameter after three steps, as a fraction of how far the
  parameter has moved; at most {UPDATE_TOLERANCE:.0e}.
- **gradient**: the same for the first step's gradients, of each one's own norm; at most
  {GRADIENT_TOLERANCE:.0e}, so that a wrong gradient cannot hide by being small.
- **open**: parameters that plain torch does not determine to these tolerances, such as the bias of
  keys under a softmax, whose gradient is rounding and nothing else. They, and what
  depends on them, are held to twice the difference that torch shows to itself when micro-batches or
  rows come in another order, or weights change in their last bit (`tests/families/parity.py`).
- **bf16**: the relative difference of a bf16 step's loss from the fp32 one's; at most
  {BF16_TOLERANCE:.0%} (a check that every operation of the model runs in bf16, not of accuracy);
  *no* where transformers' own code fails in bf16, with what it keeps in fp32 (see the notes).
- **folder**: the largest relative error of the loss against `from_pretrained` in fp32, after the
  model was saved as an fp32 and as a bf16 folder whose buffers have bits that bf16 lacks; at most
  {LOSS_TOLERANCE:.0e}, and after a step the same limits for updates. Buffers are those of
  `from_pretrained`, and an export equals the folder in all that is not trained
  (`tests/families/folders.py`). **in bf16**: that of a step of the bf16 folder in bf16; the same
  limit, because both round the same weights in the same places.
- **resume**: whether a run that was saved after a step goes on bit for bit in another process, for
  the model given as a module or folder in fp32 and in bf16, and as a module cast by `.to`. *exact*
  but for what is named; that is refused when the engine is made, because files of weights do not
  hold buffers that a class computes, which such a cast rounds (`tests/families/roundtrip.py`).

The class is the one that `architectures` in config.json names: a causal language model, one that
also takes images or sound, which is trained on text, or a reward model
(`...ForSequenceClassification`). Masked language models, encoders, encoder-decoders and other heads
are refused. Every tensor of a folder is in the export, under its name and bit for bit where it is
not trained: towers, and what the class has no place for (layers that predict further tokens, as
`mtp.*`), which checkpoints keep as well. Tied weights are written once.

Parameters without any gradient (the vision tower of a model that is given text) stay as they are,
without weight decay, as in torch. Inside a layer that runs, a missing gradient counts as zero: an
expert without tokens decays like any other weight, whichever experts the step happened to use.

In bf16 weights are computed in bf16; masters and moments are fp32. transformers keeps a few
parameters of some families in fp32 (`_keep_in_fp32_modules_strict`, or made so by the class; mostly
of routers and decay rates): these are computed with in fp32, as after `from_pretrained`. A buffer
has the type that transformers gives it in a model of the same precision.

The loss is that of the model's own forward: cross entropy of the next token, or, where it does not
shift labels (decoders of models for pairs of texts), of the token in the same place, and what its
configuration adds for its routers (`output_router_logits: true`, see [losses.md](losses.md)). A
class, function or configuration that adds to it otherwise, or leaves out layers at random
(`layerdrop`), is refused by name. So is, whatever the family, a model whose layers share weights,
that computes between its layers, that calls a layer twice, or that keeps state of its own.
"""

MEDIA_HEAD = """\

## Images and sound

Models that take images, videos or sounds train on them as on text. A micro-batch has, beside
`input_ids` and `labels`, the tensors that the model's processor makes, on the CPU; placeholders
stand in the tokens, as many as the encoder makes features, and have no labels:

```python
batch = processor.apply_chat_template(
    messages, tokenize=True, return_dict=True, return_tensors="pt", padding=True
)
labels = batch["input_ids"].clone()
labels[batch["input_ids"] == model_config.image_token_id] = -100
labels[batch["attention_mask"] == 0] = -100
engine.step([{{**batch, "labels": labels}}, other_micro_batch])
```

A step may mix micro-batches with media and without. Encoders (the vision or audio tower) are
frozen unless `train_only` names them; what projects their features is trained. A step without
media leaves both as they are, as plain PyTorch does; so does one that gives no gradient to a part
of them (a layer of the tower that features do not use, or what is of sounds where a step has images
alone). Rows of several documents do not take media.

The table compares the {count} multimodal families of transformers with plain PyTorch, as above: a
tiny random model with its encoders takes three steps, with media and text, text alone, and both.
**{passing} pass**, {text} train on text alone, {refused} are refused, {untrained} cannot be
made here, and {untried} have not been tried with media. **trained** is the largest error of a
first gradient where the encoders are trained, too (left out where it has not been tried).
**saved**: a resumed run goes on and an export comes out to the bit. `tests/families/test_media.py`
compares the document with what happens: seven families in `make test`, the others exhaustively.
"""


def find_all_media(names: list[str] | None = None) -> list[MediaDiagnostic]:
    """Findings of multimodal families, several at a time."""
    chosen = [family for family in media.families() if names is None or family in names]
    with ProcessPoolExecutor(WORKERS, initializer=_start) as pool:
        found = []
        for finding in pool.map(examine_media, chosen):
            print(finding.name, finding.result, finding.reason, file=sys.stderr, flush=True)
            found.append(finding)
    return found


def render_media(rows: Mapping[str, str]) -> str:
    """The section on images and sound, of the table's rows by family."""
    count = Counter(row.split(" | ")[1] for row in rows.values())
    head = MEDIA_HEAD.format(
        count=len(rows),
        passing=count[PASSES],
        text=count[TEXT_ALONE],
        refused=count[REFUSED],
        untrained=count[NOT_TRAINED],
        untried=count[NOT_TRIED],
    )
    names = "| family | result | why, or media | loss | update | gradient | trained | saved |"
    order = [rows[family] for family in media.families()]
    return "\n".join([head, names, "|---|---|---|---|---|---|---|---|", *order, ""])


def _media_row(f: MediaDiagnostic) -> str:
    passes = f.result == PASSES
    errors = [f.errors.loss, f.errors.update, f.errors.gradient, f.trained.gradient]
    cells = [_error(value) if passes else "" for value in errors]
    if not f.trained.first:
        cells[-1] = ""
    if f.all_trained:
        cells[-1] = f"no: {f.all_trained}"
    cells.append("exact" if passes and f.round_trip else "")
    why = ", ".join(f"`{name}`" for name in f.media) if passes else f.reason
    return f"| {' | '.join([f.name, f.result, why, *cells])} |"


def find_all(names: list[str] | None = None) -> list[Diagnostic]:
    """Findings of families (all of them) and then of variants, several at a time."""
    wanted = [(f, None, f) for f in families()]
    wanted += [(family, changes, name) for name, (family, changes) in VARIANTS.items()]
    chosen = [w for w in wanted if names is None or w[2] in names]
    with ProcessPoolExecutor(WORKERS, initializer=_start) as pool:
        found = []
        for finding in pool.map(_try, *zip(*chosen, strict=True)):
            print(finding.name, finding.result, finding.reason, file=sys.stderr, flush=True)
            found.append(finding)
    return found


def _try(family: str, changes: dict[str, Any] | None, name: str) -> Diagnostic:
    finding = examine(family, changes, name)
    if finding.result == PASSES:
        finding.folder = from_folders(family, changes)
        trips = round_trips(tiny_model(family, changes=changes))
        finding.resume = summary(trips)
        failures = [text for text in trips.values() if text.startswith(WRONG)]
        if failures := finding.folder.failures + failures:
            finding.result, finding.reason = WRONG, "; ".join(failures)
    return finding


def _start() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    single_threaded()


def render(findings: list[Diagnostic]) -> str:
    """The document."""
    own = [f for f in findings if f.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    others = [f for f in findings if f.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    head = HEAD.format(
        count=len(own),
        version=transformers.__version__,
        passing=sum(f.result == PASSES for f in own),
        refused=sum(f.result == REFUSED for f in own),
        untrained=sum(f.result == NOT_TRAINED for f in own),
    )
    return "\n".join(
        [
            head,
            "## Refused, or not trainable\n",
            *_reasons([f for f in own if f.result != PASSES]),
            "\n## Variants\n",
            "Switches that released checkpoints set otherwise than the class does.\n",
            *_reasons([f for f in others if f.result != PASSES]),
            "",
            *_table([f for f in others if f.result == PASSES]),
            "\n## Passing families\n",
            *_table([f for f in own if f.result == PASSES]),
            "",
        ]
    )


def _reasons(findings: list[Diagnostic]) -> list[str]:
    rows = [f"| {f.name} | {f.result} | {f.reason} |" for f in findings]
    return ["| name | result | why |", "|---|---|---|", *rows]


def _table(findings: list[Diagnostic]) -> list[str]:
    rows = [[str(cell(finding)) for cell in COLUMNS.values()] for finding in findings]
    return [f"| {' | '.join(row)} |" for row in [[*COLUMNS], ["---"] * len(COLUMNS), *rows]]


def _error(value: float | None) -> str:
    return "no" if value is None else f"{value:.0e}"


# Of the tables of what passes, from left to right: name and what is said of a finding.
COLUMNS: dict[str, Callable[[Diagnostic], Any]] = {
    "name": lambda f: f.name,
    "result": lambda f: f.result,
    "loss": lambda f: _error(f.errors.loss),
    "own loss": lambda f: _error(f.errors.own),
    "update": lambda f: _error(f.errors.update),
    "gradient": lambda f: _error(f.errors.gradient),
    "open": lambda f: len(f.errors.noisy) or "",
    "bf16": lambda f: _error(f.bf16),
    "folder": lambda f: _error(f.folder.loss),
    "folder in bf16": lambda f: _error(f.folder.bf16),
    "resume": lambda f: f.resume,
    "layers": lambda f: f.layers,
    "tied": lambda f: "yes" if f.tied else "",
    "notes": lambda f: "; ".join(f.notes),
}


def documents_this_version() -> bool:
    """Whether the document was written with the installed transformers."""
    return f"transformers {transformers.__version__}." in DOCUMENT.read_text()


def documented() -> dict[str, tuple[str, str]]:
    """Result and reason of every family and variant, as the document says."""
    return _rows(DOCUMENT.read_text().split(MEDIA_TITLE)[0])


def documented_media() -> dict[str, tuple[str, str]]:
    """The same of every multimodal family on its media."""
    return _rows(DOCUMENT.read_text().split(MEDIA_TITLE)[-1])


def _rows(text: str) -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", text, re.MULTILINE)
    return {
        name: (result, "" if result == PASSES else reason)
        for name, result, reason in rows
        if name not in ("name", "family", "---")
    }


def main() -> None:
    """Try everything and write the document; exit status 1 if anything is wrong.

    Multimodal families that are named are tried alone, and their rows are written anew.
    """
    names, text, findings = sys.argv[1:], "", list[Diagnostic]()
    if names:
        text, _, table = DOCUMENT.read_text().partition("\n" + MEDIA_TITLE)
        rows = {row.split(" | ")[0][2:]: row for row in re.findall(r"^\| .*\|$", table, re.M)}
        rows = {family: rows[family] for family in media.families()}
    else:
        findings, rows = find_all(), {}
        text = render(findings)
    of_media = find_all_media(names or None)
    rows |= {finding.name: _media_row(finding) for finding in of_media}
    DOCUMENT.write_text(text + render_media(rows))
    wrong = [f for f in (*findings, *of_media) if f.result == WRONG]
    for finding in wrong:
        print(f"WRONG: {finding.name}: {finding.reason}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
