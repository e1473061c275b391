"""What a caller keeps beside the engine's state."""

import json
from pathlib import Path
from typing import Any

from megatrain.errors import InputError
from megatrain.json_yaml import MAX_JSON_BYTES, parse_object


def as_json(extra: dict[str, Any]) -> str:
    """The caller's dictionary as text, which later changes of it do not reach.

    Raises:
        InputError: it could not be read back.
    """
    where = Path("the extra state of a checkpoint")
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where} cannot be saved: {error}; give plain JSON values") from error
    if len(text) > MAX_JSON_BYTES:
        raise InputError(f"{where} takes {len(text)} bytes; {MAX_JSON_BYTES} are allowed")
    parse_object(text.encode(), where)
    return text
