"""Texts and replies from a model that is open, be it in training or resident on the device.

`generate` is all that most callers need; `open_model` opens what `megatrain generate` is given.
"""

from megatrain.generate.loading import open_model
from megatrain.generate.resident import Resident
from megatrain.generate.sampling import Sampling
from megatrain.generate.server import Continued, Server
from megatrain.generate.talk_cache import Kept
from megatrain.generate.texts import continued, generate, stop_ids
