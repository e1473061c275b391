"""The optimizers' rules that sweeps go over: each of RULES, with each choice of what it keeps."""

from collections.abc import Callable
from functools import partial

from megatrain import AdamW
from megatrain.optim import RULES, Rule

SWEPT: dict[str, Callable[..., Rule]] = {
    **RULES,
    "adamw bf16": partial(AdamW, states="bf16"),
    "adamw int8": partial(AdamW, states="int8"),
}
