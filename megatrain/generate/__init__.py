"""Texts and replies from an open model, in training or resident on the device.

`generate` is all that most callers need; `open_model` opens what `megatrain generate` is given.
"""

from megatrain.generate.models import Resident, open_model
from megatrain.generate.sampling import Sampling
from megatrain.generate.server import Continued, Server
from megatrain.generate.texts import continued, generate, stop_ids
