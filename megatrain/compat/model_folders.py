"""Import this before names of `transformers.models`: transformers then reads its folders once.

It reads the 1,600 files of its models when it is imported, and again for the first name of a model,
as its cache holds 128 folders and there are 550. The second time takes 0.3 seconds.
"""

import sys
from pathlib import Path

import transformers
from transformers.utils import import_utils

from megatrain.base.changed import changed

if "transformers.models" not in sys.modules:
    _folder = Path(transformers.__file__).parent / "models"
    _read = import_utils.define_import_structure(_folder, prefix="models")  # as it was read before
    _names = {
        backends: {m.removeprefix("models."): n for m, n in of.items() if m.startswith("models.")}
        for backends, of in _read.items()
    }
    with changed([import_utils], define_import_structure=lambda *_: _names):
        import transformers.models
