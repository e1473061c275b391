"""What a reference model says of replies: computed once, kept in the run's folder.

The reference is the model as the run begins; with a new adapter that is the base.
"""

import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.api import Engine
from megatrain.base.whole_files import write_file
from megatrain.config import Config
from megatrain.data import ReplyDataset
from megatrain.errors import InputError
from megatrain.loss import KTO, PairLoss, Reward
from megatrain.parallel.distributed import Ranks
from megatrain.run_folder.layout import REFERENCES
from megatrain.train.resume import Start
from megatrain.train.sharing import logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class References:
    """Summed log-probabilities of the lines of each data set `[rows, lines]`.

    `keys` tells what they are of: a data set's tokens, template and settings, and the model.
    """

    sums: dict[str, Tensor]
    keys: dict[str, str]

    def write(self, run: Path) -> None:
        """Write the log-probabilities to a run's folder, whole or not at all."""
        sums = {name: each.tolist() for name, each in self.sums.items()}
        kept = {"keys": self.keys, "sums": sums}
        write_file(run / REFERENCES, json.dumps(kept | {"crc32": _crc32(kept)}))

    @classmethod
    def read(cls, run: Path) -> "References":
        """Read them from a run's folder; a file without a checksum (earlier versions) has no sums.

        Raises:
            InputError: they are missing or damaged.
        """
        path = run / REFERENCES
        try:
            kept = json.loads(path.read_text())
            if "crc32" not in kept:
                kept["sums"] = {}
            elif kept.pop("crc32") != _crc32(kept):
                raise ValueError("it is not as it was written")
            sums = {name: torch.tensor(each) for name, each in kept["sums"].items()}
            return cls(sums, dict(kept["keys"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: what the run keeps of its reference cannot be read ({error}); put the "
                "file back, or begin a run from these weights with megatrain branch --fresh"
            ) from error


def _crc32(kept: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(kept).encode())


def refer(
    config: Config,
    engine: Engine,
    data: dict[str, Any],
    rows: int,
    start: Start | None,
    ranks: Ranks,
    begun: Callable[[], Engine],
) -> References | None:
    """Tell data sets of replies their loss and, where it asks for one, what its reference says.

    Args: `begun`: opens the model as the run began, for a run whose sums have no checksum.

    Raises:
        InputError: a run goes on, and what it has kept is of other data or another model.
    """
    loss = config.loss.loss()
    sets = {name: each for name, each in data.items() if isinstance(each, ReplyDataset)}
    for each in sets.values():
        assert isinstance(loss, PairLoss | KTO)  # such data are opened for these alone
        pad = engine.config.get_text_config(decoder=True).pad_token_id
        each.train_with(loss, pad=pad if isinstance(loss, Reward) else -1)
    if not sets or config.loss.reference != "kept":
        return None
    keys = {name: _key(config, each) for name, each in sets.items()}
    at_once = max(1, config.training.batch_size // rows)
    if start is None:
        sums = {name: _sums(engine, each, rows, at_once, ranks) for name, each in sets.items()}
        known = References(sums, keys)
    else:
        run = _run_of(start)
        known = References.read(run)
        for name in keys:
            kept = known.keys.get(name)
            if kept is None or _placeless(kept) != _placeless(keys[name]):
                raise InputError(
                    f"{run / REFERENCES}: the reference's log-probabilities are not of this data "
                    f"({name}) and model; set them back, or begin anew: megatrain branch --fresh"
                )
        if not known.sums:
            log.info("%s has no checksum, so it counts as absent", run / REFERENCES)
            with begun() as model:
                sums = {
                    name: _sums(model, each, rows, at_once, ranks) for name, each in sets.items()
                }
            known = References(sums, keys)
    for name, each in sets.items():
        each.compare_with(known.sums[name])
    return known


def refer_to(key: str, start: Start | None) -> References:
    """That a run has a second model beside it, known by `key`, and not what it says.

    Raises:
        InputError: a run goes on, and its second model was another one.
    """
    found = References({}, {"model": key})
    if start is not None and References.read(run := _run_of(start)).keys != found.keys:
        raise InputError(
            f"{run / REFERENCES}: the reference or teacher is not the one that the run began with "
            "(its files have other sizes, times or bytes); put it back, or begin anew: megatrain "
            "branch --fresh"
        )
    return found


def _run_of(start: Start) -> Path:
    return start.checkpoint.absolute().parent.parent


def _key(config: Config, data: ReplyDataset) -> str:
    model, adapter = config.model.model_dump(mode="json"), config.adapter.model_dump(mode="json")
    of_model = {name: model[name] for name in ("path", "config")} | {"adapter": adapter}
    return json.dumps([data.fingerprint, data.lines, len(data), of_model], sort_keys=True)


def _placeless(key: str) -> list[Any]:
    """A key without the place of the model: a run goes on with the same one, which may have moved.

    Its checkpoints see to it that the model is the same.
    """
    *data, of_model = json.loads(key)
    return [data, {name: each for name, each in of_model.items() if name != "path"}]


def _sums(engine: Engine, data: ReplyDataset, rows: int, at_once: int, ranks: Ranks) -> Tensor:
    log.info("computing the reference's log-probabilities of %s rows", f"{len(data):,}")
    starts = range(0, len(data), rows)
    every = [range(start, min(start + rows, len(data))) for start in starts]
    sums: list[Tensor] = []
    for first in range(0, len(every), at_once):
        step = [data.plain(each) for each in every[first : first + at_once]]
        sums += [each.double().sum(1) for each in logprobs(engine, step, ranks)]
    return torch.cat(sums).view(len(data), -1).float()
