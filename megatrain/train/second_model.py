"""A frozen second model beside the trained one: a reference of replies, or a teacher.

The reference is the model at the run's beginning; with a new adapter that is the base. For pairs of
replies it answers once, and its answers are kept. A teacher answers in each step.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.api import Engine
from megatrain.base.json_yaml import json_crc32
from megatrain.base.whole_files import write_file
from megatrain.compat.torch import can_compile
from megatrain.config import Config, ModelSection
from megatrain.data import PackedDataset, ReplyDataset, Step
from megatrain.errors import InputError, explained
from megatrain.loss import DPO, IGNORED, Distillation, JointLoss
from megatrain.model.sizes import check_sequence_length
from megatrain.placement import Placement
from megatrain.run_folder.layout import REFERENCES
from megatrain.telemetry.gpu import find_gpu
from megatrain.train.resolve import ResolvedModel
from megatrain.train.resume import Start
from megatrain.train.sharing import logprobs

_IMPOSSIBLE = -1e9  # the log-probability of a token that the trained model does not have
log = logging.getLogger(__name__)


def open_reference(config: Config, model: ResolvedModel, group: Any = None) -> Engine:
    """Open the model at the run's beginning in an engine of `group` without an optimizer."""
    log.info("the reference model rests in host memory beside the one that is trained")
    placement = config.engine.placement
    if isinstance(placement, dict):  # compile its layers if the trained model's are
        compiled = bool(placement.get("compile", False))
    else:
        compiled = config.engine.device != "cpu" and find_gpu() is not None and can_compile()
    options: dict[str, Any] = {"seed": config.training.seed, "base": config.model.base}
    return _frozen_engine(config, model.for_engine, Placement(compile=compiled), group, **options)


def _frozen_engine(
    config: Config, source: Any, placement: Placement, group: Any, **options: Any
) -> Engine:
    """An engine without an optimizer, with the run's settings of devices and memory."""
    options |= config.engine.model_dump(
        include={"precision", "device", "device_memory", "host_memory"}
    )
    options |= config.model.model_dump(include={"trust_remote_code", "attn_implementation"})
    return Engine(source, max_grad_norm=None, placement=placement, group=group, **options)


@dataclass(frozen=True)
class References:
    """The record of a run's second model.

    `sums`: by data set, a reference's log-probabilities of each line `[rows, lines]`, if the run
    keeps them. `keys`: by data set, a text that identifies the set's rows and the model; without
    `sums` one text for the model.
    """

    sums: dict[str, Tensor]
    keys: dict[str, str]

    def write(self, run: Path) -> None:
        """Write the record to a run's folder, whole or not at all."""
        content = {"keys": self.keys, "sums": {name: t.tolist() for name, t in self.sums.items()}}
        write_file(run / REFERENCES, json.dumps(content | {"crc32": json_crc32(content)}))

    @classmethod
    def read(cls, run: Path) -> "References":
        """Read the record of a run. Raises InputError: it is missing or damaged."""
        path = run / REFERENCES
        remedy = "put the file back, or begin a new run with this run as model.path"
        with explained(f"{path}: what the run keeps of its reference cannot be read", remedy):
            content = json.loads(path.read_text())
            if content.pop("crc32") != json_crc32(content):
                raise ValueError("it has changed since it was written")
            sums = {name: torch.tensor(values) for name, values in content["sums"].items()}
            return cls(sums, dict(content["keys"]))


def same_model(key: str, start: Start | None) -> References:
    """The record of a second model with this `key`. Raises InputError: it was another before."""
    if start is not None and References.read(start.run).keys != {"model": key}:
        raise InputError(
            f"{start.run / REFERENCES}: the reference or teacher has changed since the run began; "
            "put the old files back, or begin a new run with this run as model.path"
        )
    return References({}, {"model": key})


def prepare_replies(
    config: Config, engine: Engine, data: dict[str, Any], rows: int, start: Start | None
) -> References | None:
    """Give data sets the padding token, and those of replies the loss and DPO's reference sums.

    Raises InputError: a resumed run's reference sums are of other data or another model.
    """
    loss = config.loss.loss()
    for dataset in data.values() if config.loss.head else ():  # heads that score or label rows
        pad = engine.config.get_text_config(decoder=True).pad_token_id
        dataset.pad = -1 if pad is None else pad  # no token is -1
    sets = {name: dataset for name, dataset in data.items() if isinstance(dataset, ReplyDataset)}
    for replies in sets.values():
        assert isinstance(loss, JointLoss)  # data sets of replies are for such losses alone
        replies.loss = loss
    if not isinstance(loss, DPO):
        return None
    model_key = config.model.model_dump(mode="json", include={"path", "config"})
    model_key["adapter"] = config.adapter.model_dump(mode="json")
    keys = {}
    for name, replies in sets.items():
        parts = [replies.fingerprint, replies.lines, len(replies), model_key]
        keys[name] = json.dumps(parts, sort_keys=True)

    if start is None:
        at_once = max(1, config.training.batch_size // rows)  # micro-batches, of `rows` each
        sums = {n: _sums(engine, replies, rows, at_once) for n, replies in sets.items()}
        recorded = References(sums, keys)
    else:
        recorded = References.read(start.run)
        for name, key in keys.items():
            recorded_key = recorded.keys.get(name)  # compared without paths, as folders may move
            if recorded_key is None or _without_path(recorded_key) != _without_path(key):
                raise InputError(
                    f"{start.run / REFERENCES}: the reference's log-probabilities are not of this "
                    f"data ({name}) and model; set both back, or begin a new run with this run as "
                    "its model.path"
                )
    for name, replies in sets.items():
        replies.reference = recorded.sums[name]
    return recorded


def _without_path(key: str) -> list[Any]:
    """A key without the model's path, since folders may move."""
    *data, model_key = json.loads(key)
    return [data, {name: value for name, value in model_key.items() if name != "path"}]


def _sums(engine: Engine, data: ReplyDataset, rows: int, at_once: int) -> Tensor:
    """The reference's summed log-probability of each line `[rows, lines]`, for `References`."""
    log.info("computing the reference's log-probabilities of %s rows", f"{len(data):,}")
    groups = [range(len(data))[start : start + rows] for start in range(0, len(data), rows)]
    sums: list[Tensor] = []
    for first in range(0, len(groups), at_once):
        step = [data.plain(part) for part in groups[first : first + at_once]]
        sums += [values.double().sum(1) for values in logprobs(engine, step, data)]
    return torch.cat(sums).view(len(data), -1).float()


class Teacher:
    """A frozen model whose likeliest tokens the trained model, of `vocab_size` tokens, learns.

    Several ranks share the teacher, and each asks for its own micro-batches.
    """

    def __init__(self, config: Config, model: ResolvedModel, vocab_size: int, group: Any) -> None:
        """Open the teacher in an engine without an optimizer. Raises InputError, DoesNotFit."""
        log.info("the teacher rests in host memory beside the model that is trained")
        self._config, self._vocab_size = config, vocab_size
        self.engine = _frozen_engine(config, model.source, Placement(), group)
        if self.engine.label_shift != 1:
            self.engine.close()
            raise InputError("loss.teacher: it predicts tokens in their own place; take another")

    def with_answers(self, step: Step, data: PackedDataset | None = None) -> Step:
        """Add the ids and log-probabilities of the likeliest tokens for each label.

        Args: `data`: the micro-batches' data set, to read images from; None: they have no images.
        """
        loss, engine = self._config.loss, self.engine
        rows = step if data is None else [data.with_images(micro) for micro in step]
        top_k = loss.top_k or 1
        labelled = any(bool((micro["labels"][:, 1:] != IGNORED).any()) for micro in rows)
        if any(engine.ranks.all_gather_object(labelled)):  # all ranks compute the forward, or none
            answers = engine.top_logprobs(rows, top_k, loss.temperature or 1.0)
        else:
            shapes = [(*micro["labels"].shape, top_k) for micro in rows]
            answers = [(torch.zeros(s, dtype=torch.int64), torch.zeros(s)) for s in shapes]
        answered = []
        for micro, (ids, log_probs) in zip(step, answers, strict=True):
            unknown = ids >= self._vocab_size  # padding rows of the teacher's table
            choices = ids.masked_fill(unknown, 0), log_probs.masked_fill(unknown, _IMPOSSIBLE)
            answered.append(micro | dict(zip(Distillation.choices, choices, strict=True)))
        return answered


def find_teacher(config: Config, model: ResolvedModel) -> ResolvedModel | None:
    """The teacher that a run file names; None: it names none.

    Raises InputError: there is no such model, or it cannot teach `model`.
    """
    name, trusted = config.loss.teacher, config.model.trust_remote_code
    if name is None:
        return None
    with explained("loss.teacher", of=InputError):
        resolved = ResolvedModel.of(ModelSection(path=name, trust_remote_code=trusted))
        check_sequence_length(resolved.config, config.data.sequence_length)
        vocab = resolved.tokenizer.get_vocab()
    rows, trained_rows = resolved.text_config.vocab_size, model.text_config.vocab_size
    if vocab != model.tokenizer.get_vocab():
        raise InputError(
            f"loss.teacher: {name} has another vocabulary than the model that is trained, so their "
            "tokens cannot be compared; take a teacher with the same tokenizer"
        )
    needed = min(trained_rows, max(vocab.values(), default=0) + 1)
    if rows < needed:
        raise InputError(
            f"loss.teacher: {name} has {rows} embeddings, and its tokenizer needs {needed}; "
            f"call its resize_token_embeddings({needed}) and save it, or take another teacher"
        )
    if (top_k := config.loss.top_k or 0) > (most := min(rows, trained_rows)):
        raise InputError(f"loss.top_k is {top_k}, and there are {most} tokens; take fewer")
    return resolved
