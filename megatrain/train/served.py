"""A server that makes replies of a run: it gets the weights, and is compared with the engine."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.api import Engine
from megatrain.config import Config, RolloutSection
from megatrain.data import Step
from megatrain.errors import InputError, RunFailed
from megatrain.generate import Continued, Sampling, Server
from megatrain.loss import IGNORED, ImportanceSampling
from megatrain.parallel.distributed import Ranks
from megatrain.train.sharing import from_first

_MARK = ".rollouts"  # in folders that rollouts write weights to
_FAR = 0.5  # nats; bf16 is some hundredths off


class Served:
    """Replies of a server that has the engine's weights whenever it replies.

    Of several ranks the first one speaks with it.
    """

    _server: Server  # of the first rank

    def __init__(self, config: Config, engine: Engine, ranks: Ranks) -> None:
        """Bring the server the weights as they are.

        Raises:
            InputError: it cannot be used.
        """
        self._settings, self._engine, self._brought = config.rollout, engine, -1
        self._ranks = ranks
        self._export: dict[str, Any] = {"merged": config.adapter.method is not None}
        if config.engine.precision != "fp32":
            self._export["dtype"] = torch.bfloat16
        try:
            from_first(ranks, lambda: self._open(config.data.sequence_length))
            self._bring_weights()
        except RunFailed as error:
            raise InputError(str(error)) from None

    def _open(self, length: int) -> None:
        address, seconds = self._settings.server, self._settings.server_seconds
        assert address is not None
        size = self._engine.vocab_size
        self._server = Server(address, vocab_size=size, length=length, seconds=seconds)

    def _bring_weights(self) -> None:
        """Give the server the weights of this step, unless it has them."""
        if self._brought == self._engine.steps:
            return
        assert self._settings.server_weights is not None
        folder = Path(self._settings.server_weights).expanduser()
        from_first(self._ranks, lambda: _claim(folder))
        self._engine.save_pretrained(folder, **self._export)
        from_first(self._ranks, lambda: self._server.load(folder))
        self._brought = self._engine.steps

    def replies(
        self, ids: Sequence[Sequence[int]], count: int, sampling: Sampling, stops: Collection[int]
    ) -> list[Continued]:
        """`count` replies to each prompt, beside one another, by the weights of this step."""
        self._bring_weights()
        asked = ids, count, sampling, stops
        return from_first(self._ranks, lambda: self._server.continued(*asked))


def _claim(folder: Path) -> None:
    """Make it a folder of rollouts. Raises InputError: it has other files."""
    mark = folder / _MARK
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise InputError(
            f"rollout.server_weights: {folder} has files that no rollouts wrote, and they "
            "would be lost; give an empty or a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()  # first, and the export keeps it: whoever is killed finds a folder of its own


def compare(
    settings: RolloutSection,
    made: Step,
    drawn_at: Sequence[Sequence[float]],
    by: ImportanceSampling | None,
) -> dict[str, float]:
    """Put into micro-batches how each label counts; what the log says of it, by TRL's names.

    Args:
        made: micro-batches with `old_logp`, of one reply in each row.
        drawn_at: log-probabilities of each reply's tokens as the server says, row after row.
        by: what corrects for them; None: nothing does, and nothing is put in.

    Raises:
        RunFailed: the engine's are so far from them that the server has other weights.
    """
    rows = [row for m in made for row in zip(m["labels"], m["old_logp"], strict=True)]
    found: list[tuple[Tensor, Tensor]] = []  # of each reply's labels, the engine's and theirs
    for (labels, own), said in zip(rows, drawn_at, strict=True):
        used = labels != IGNORED
        theirs = torch.tensor(said if used.any() else [], dtype=torch.float32)
        found.append((own[used], theirs))
    told = _differences(settings, found)
    if by is None:
        return told
    ratios = [by.ratios(*each).float() for each in found]
    remaining = iter(ratios)
    for micro in made:
        micro["importance_sampling_ratio"] = torch.zeros_like(micro["old_logp"])
        for row, labels in zip(micro["importance_sampling_ratio"], micro["labels"], strict=True):
            row[labels != IGNORED] = next(remaining)
    return told | _described(ratios, of_replies=by.of_replies)


def _differences(
    settings: RolloutSection, found: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    each = torch.cat([(own - theirs).abs() for own, theirs in found]).double()
    each = each[~each.isnan()]
    if not len(each):
        return {}
    mean = float(each.mean())
    cut = settings.top_p < 1 or settings.top_k or settings.repetition_penalty != 1
    if not cut and not mean <= _FAR:
        raise RunFailed(
            f"rollout.server {settings.server}: log-probabilities of its tokens are {mean:.3g} "
            "from the engine's in the mean: it serves other weights, or was started without "
            "--logprobs-mode processed_logprobs"
        )
    named = {"mean": mean, "max": float(each.max())}
    return {f"sampling/sampling_logp_difference/{name}": v for name, v in named.items()}


def _described(ratios: Sequence[Tensor], *, of_replies: bool) -> dict[str, float]:
    """Ratios of labels, or one of each reply: 1 where a reply has nothing to learn."""
    if of_replies:
        ratios = [each[:1] if len(each) else torch.ones(1) for each in ratios]
    every = torch.cat([*ratios])
    if not len(every):
        return {}
    named = {"min": every.min(), "mean": every.mean(), "max": every.max()}
    return {f"sampling/importance_sampling_ratio/{name}": float(v) for name, v in named.items()}
