"""What the model makes of fixed prompts while it is trained."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from megatrain.config import Config
from megatrain.errors import MegatrainError, in_one_line
from megatrain.generate import Sampling, generate
from megatrain.train.setup import Job

_SHOWN = 160  # characters of a text in a line

log = logging.getLogger(__name__)


class Samples:
    """The likeliest continuation of each prompt, so that those of two states can be compared."""

    def __init__(self, config: Config, job: Job) -> None:
        self._settings, self._job = config.training.samples, job

    def take(self, say: Callable[[str], None]) -> dict[str, Any]:
        """What the log has of them; nothing where there are no prompts.

        What cannot be generated costs a warning, not the run; but what one of several ranks alone
        fails at, while the others wait for it, ends them all.
        """
        if self._settings is None:
            return {}
        prompts, engine = self._settings.prompts, self._job.engine
        sampling = Sampling(max_new_tokens=self._settings.max_new_tokens, temperature=0)
        try:
            with torch.random.fork_rng():
                texts = generate(engine, self._job.tokenizer, prompts, sampling)
        except MegatrainError as error:
            if self._job.ranks.size > 1 and error.__cause__ is not None:
                raise
            log.warning("no samples from here on: %s", error)
            self._settings = None
            return {}
        asked = [p if isinstance(p, str) else str(p[-1].get("content")) for p in prompts]
        made = [{"prompt": a, "text": t} for a, t in zip(asked, texts, strict=True)]
        for each in made:
            say(f"  {in_one_line(each['prompt'], _SHOWN)} -> {in_one_line(each['text'], _SHOWN)}")
        return {"samples": made}
