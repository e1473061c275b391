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
    _structure = import_utils.define_import_structure(_folder, prefix="models")  # from the cache
    _inner = {
        backends: {m.removeprefix("models."): n for m, n in part.items() if m.startswith("models.")}
        for backends, part in _structure.items()
    }
    with changed([import_utils], define_import_structure=lambda *_: _inner):
        import transformers.models
