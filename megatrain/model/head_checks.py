"""Checks that a head's loss is the cross entropy of its labels, and that it mixes no tokens.

transformers' models compute a loss in their forward if they get labels. The engine computes the
loss separately, so that logits never exist as a whole; anything that a model adds to its loss would
be lost. So the head is tried on a few random hidden states. Other code than transformers' may treat
tokens in another way that no trial has: its loss must be computed from the labels by a cross
entropy alone, and not from the input's tokens.

Random weights are random in their first values, which give logits of some tokens, and zero
elsewhere, where they take no memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.base.changed import changed
from megatrain.compat.torch import READS_OF_VALUES, memory_of, pytree
from megatrain.compat.transformers import CAUSAL_LM_CLASSES, configs
from megatrain.errors import Unsupported, in_one_line
from megatrain.loss import IGNORED, targets_of
from megatrain.model.capture import last_hidden, with_hidden
from megatrain.model.routers import RouterLoss
from megatrain.model.spec import ModelSpec
from megatrain.model.zeros import ZeroProducts, zero_pages

_SHAPE = (2, 10)
_UNLABELLED = [(0, 2), (1, 3), (1, 5)]  # row and token; the rows have different numbers of labels
_SPECIAL_PLACES = [p for p in product(range(2), range(1, 10)) if p not in _UNLABELLED]
_RANDOM = 1 << 18  # values of a parameter that are random: tables may be larger than memory
_TOLERANCE = 1e-6  # of the loss, in fp32
_TOKENS = 2  # of each row in a trial of mixed tokens


def label_shift(spec: ModelSpec) -> int:
    """The number of tokens from logits to the label with which they are compared: 1, or 0.

    Raises Unsupported: the loss is no mean cross entropy of labels, the head no language model's.
    """
    model = spec.capture.model
    name, count = type(model).__name__, model.config.get_text_config(decoder=True).vocab_size
    if spec.capture.task == "SEQ_CLS":
        _try_scores(spec, name)
        return 0  # scores are compared at their own token
    if spec.num_logits < count and spec.capture.task == "CAUSAL_LM":
        raise Unsupported(
            f"{name} makes {spec.num_logits} numbers of a token, and its vocabulary has {count}:"
            " its head is not a language model's; give a model with one (...ForCausalLM)"
        )
    if spec.capture.task == "FEATURE_EXTRACTION":
        return 0
    shift = _shift_of_loss(spec, name)
    if spec.router_loss is not None:
        _try_routers(spec, spec.router_loss, shift, name)
    if shift == 0 and name not in CAUSAL_LM_CLASSES and spec.capture.task == "CAUSAL_LM":
        raise Unsupported(
            f"{name} predicts each token at its own place, not the next one: it is not a causal "
            "language model; load it with AutoModelForCausalLM"
        )
    return shift


def _try_scores(spec: ModelSpec, name: str) -> None:
    """Raises Unsupported: a row's score depends on more than the last token's hidden state."""
    text = spec.capture.model.config.get_text_config(decoder=True)
    ids_BT = torch.full(_SHAPE, int(text.pad_token_id == 0))  # no padding
    spec.capture.model.eval()
    with _on_random_states(spec, input_ids=ids_BT) as (weights, output, inputs):
        scores = spec.capture.own_loss(weights, output, inputs)[1]
        last_BK = spec.capture.head(weights, output, inputs)[:, -1]
    spec.capture.model.train()
    if (
        scores is None
        or scores.shape != last_BK.shape
        or not torch.allclose(scores, last_BK, 1e-4, 1e-4)
    ):
        raise Unsupported(
            f"{name} does not score a row by its last token alone; take a decoder's, such as "
            "Qwen3ForSequenceClassification"
        )


def _shift_of_loss(spec: ModelSpec, name: str) -> int:
    """`label_shift`, from a comparison of the model's loss with the cross entropy of its logits."""
    model, labels_BT = spec.capture.model, _labels(spec)
    module = getattr(model.loss_function, "__module__", None) or ""
    if module.partition(".")[0] not in ("transformers", "transformers_modules"):
        raise Unsupported(
            f"{name} defines a loss_function, which MegaTrain does not compute; remove the "
            "function, or train elsewhere"
        )
    ids_BT = torch.zeros_like(labels_BT)
    watch = _ReadsTokens(labels_BT, ids_BT)
    try:
        with watch:
            loss, logits_BTV = _loss_of_model(spec, labels_BT, input_ids=ids_BT)
        value = None if loss is None else float(loss)
    except Exception as error:  # whatever a model's own code makes of these labels
        raise Unsupported(
            f"the loss in {name}'s forward cannot be computed of labels [rows, tokens] alone "
            f"({in_one_line(error, 200)}), and another one is not trained; give a model whose "
            "forward can"
        ) from error
    if value is None:
        return 1
    shifts = [n for n in (1, 0) if _is_close(value, _cross_entropy(logits_BTV, labels_BT, n))]
    if not shifts:
        raise Unsupported(
            f"the loss in {name}'s forward is not the mean cross entropy of its labels, and the "
            "difference would be left out; give a model with that loss alone"
        )
    if not type(model).__module__.startswith("transformers.") and (used := watch.before(loss)):
        raise Unsupported(
            f"the loss in {name}'s forward is computed from values of labels or input_ids (by "
            f"{used}), and what it does for some tokens alone would be left out; let it give the "
            "labels to cross_entropy as they are, and set those without a loss to -100 in the data"
        )
    return shifts[0]


def _try_routers(spec: ModelSpec, loss: RouterLoss, shift: int, name: str) -> None:
    """Raises Unsupported: the loss that the model adds for its routers is not the usual one."""
    is_on = loss.is_loss or loss.bias_rate
    if is_on and (not spec.routed or (loss.bias_rate and not spec.router_biases)):
        raise Unsupported(
            "output_router_logits, router_z_loss_coef or router_bias_update is on, and no layer of "
            f"{name} has a router (or they differ in experts), or none has a bias that could be "
            "moved (e_score_correction_bias); turn it off"
        )
    if not loss.weight:
        return
    labels_BT, mask_BT = _labels(spec), torch.ones(_SHAPE, dtype=torch.long)
    mask_BT[1, -2:] = 0
    generator = torch.Generator().manual_seed(1)
    shape = len(spec.routed), labels_BT.numel(), loss.experts(spec.routed_shape[1])
    routed = (3 * torch.randn(shape, generator=generator)).unbind()
    total, logits_BTV = _loss_of_model(spec, labels_BT, routed, attention_mask=mask_BT)
    sums = [loss.sums(logits, mask_BT.flatten().float()) for logits in routed]
    expected = _cross_entropy(logits_BTV, labels_BT, shift)
    expected += loss.weight * float(loss.balance([torch.cat(sums)])[1][0])
    if total is None or not _is_close(float(total), expected):
        raise Unsupported(
            f"output_router_logits is on in the model's configuration, and the loss that {name} "
            "adds for its routers is not the usual one; set it to false"
        )


def _labels(spec: ModelSpec) -> Tensor:
    """Labels with special tokens among them, which a loss may leave out or weigh."""
    text = spec.capture.model.config.get_text_config(decoder=True)
    count = min(text.vocab_size, spec.num_logits)
    settings = [
        item for _, part in configs(spec.capture.model.config) for item in vars(part).items()
    ]
    named = [v for name, v in settings if name.endswith(("_token_id", "_token_index"))]
    special = {v for value in named for v in (value if isinstance(value, list) else [value])}
    labels_BT = torch.arange(_SHAPE[0] * _SHAPE[1]).remainder(count).view(_SHAPE)
    usable = sorted(token for token in special if type(token) is int and 0 <= token < count)
    for place, token in zip(_SPECIAL_PLACES, usable, strict=False):
        labels_BT[place] = token
    for place in _UNLABELLED:
        labels_BT[place] = IGNORED
    return labels_BT


# Functions of torch that move values, and masks of labelled tokens.
_MOVES = {
    "__get__", "__getitem__", "__setitem__", "cat", "chunk", "clone", "contiguous", "detach",
    "expand", "flatten", "long", "masked_fill", "narrow", "pad", "permute", "reshape", "roll",
    "select", "split", "squeeze", "stack", "to", "transpose", "type", "unbind", "unsqueeze",
    "view", "where",
}  # fmt: skip
_MASKS = {("eq", IGNORED), ("ne", IGNORED), ("ge", 0), ("lt", 0)}


class _ReadsTokens(TorchFunctionMode):
    """Follows token ids through a forward; notes functions of their values but cross entropy."""

    def __init__(self, labels: Tensor, ids: Tensor) -> None:
        super().__init__()
        # By a tensor's memory: tensors of labels that were only moved; and tensors computed from
        # labels or ids, each with the name of the first function that computed with their values.
        self._moved = {memory_of(labels): labels}
        self._computed = {memory_of(ids): (ids, "input_ids")}
        self._branch = ""  # the first function of labels whose values were read for Python

    def before(self, loss: Tensor | None) -> str:
        """The first function of labels, or "input_ids", on which the loss depends, if any."""
        _, first = ("", "") if loss is None else self._computed.get(memory_of(loss), ("", ""))
        return self._branch or first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        name = getattr(func, "__name__", str(func))
        inputs = {memory_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        computed = (self._computed[memory] for memory in inputs if memory in self._computed)
        first = next((function for _, function in computed), "")
        is_unweighted = kwargs.get("weight") is None and len(args) == 2
        is_loss = func in (F.cross_entropy, F.nll_loss) and is_unweighted
        last = args[-1] if args else None
        is_mask = type(last) is int and (name.strip("_"), last) in _MASKS
        if not first and (is_loss or is_mask or inputs.isdisjoint(self._moved)):
            return result
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        leaves = pytree.tree_leaves((result, args[:1] if in_place else ()))
        results = [x for x in leaves if isinstance(x, Tensor)]
        if not first and name in _MOVES:
            self._moved |= {memory_of(tensor): tensor for tensor in results}
        else:
            first = first or name.strip("_")
            self._computed |= {memory_of(tensor): (tensor, first) for tensor in results}
            if name in READS_OF_VALUES and first != "input_ids":
                self._branch = self._branch or first
        return result


def _loss_of_model(
    spec: ModelSpec, labels_BT: Tensor, routed: tuple[Tensor, ...] = (), **more: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The loss, if any, and the logits of the model's forward on random hidden states.

    Args: `routed`: logits `[B * T, E]` of routers, whose loss is added.
    """
    with _on_random_states(spec, routed, **more) as (weights, output, inputs):
        with torch.enable_grad():  # as in training, which code may ask
            loss, logits = spec.capture.own_loss(weights, output, inputs, labels_BT)
        logits = spec.capture.head(weights, output, inputs) if logits is None else logits
        return None if loss is None else loss.detach(), logits.detach()


@contextmanager
def _on_random_states(
    spec: ModelSpec, routed: tuple[Tensor, ...] = (), **more: Tensor
) -> Iterator[tuple[dict[str, Tensor], Any, dict[str, Any]]]:
    """Within this context random weights, a trunk's output and inputs, to run the head with."""
    generator = torch.Generator().manual_seed(0)
    capture = spec.capture
    used = {*spec.gathered, *spec.prologue, *spec.epilogue}
    weights = dict[str, Tensor]()
    for name, parameter in capture.model.named_parameters():
        if name in used:  # random at the beginning, zeros that take no memory elsewhere
            weights[name] = zero_pages(parameter.shape)
            beginning = weights[name].view(-1)[:_RANDOM]
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            beginning.copy_(torch.randn(len(beginning), generator=generator) * scale)
    width = last_hidden(spec.trunk).shape[2:]
    hidden = torch.randn((*_SHAPE, *width), generator=generator, requires_grad=True)
    inputs = capture.inputs({"input_ids": torch.zeros(_SHAPE, dtype=torch.long), **more})
    output = with_hidden(spec.trunk, hidden)
    if routed:
        output["router_logits"], inputs["output_router_logits"] = routed, True
    # A padded table has more rows than the vocabulary: with its size, transformers' losses would
    # split logits into tokens wrongly.
    config = capture.model.config
    parts = [config, config.get_text_config(decoder=True), capture.model]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        changed(parts, vocab_size=spec.num_logits),
        ZeroProducts(weights.values(), _RANDOM),
    ):
        yield weights, output, inputs


def _cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, shift: int) -> float:
    flat_NV = logits_BTV.float().flatten(0, 1)
    targets_N = targets_of(labels_BT, shift).flatten()
    return float(F.cross_entropy(flat_NV, targets_N, ignore_index=IGNORED))


def _is_close(loss: float, expected: float) -> bool:
    return abs(loss - expected) <= _TOLERANCE * abs(expected)


def refuse_mixing(spec: ModelSpec) -> None:
    """Raises Unsupported: a token's logits depend on other tokens, or on its place in the row."""
    model = spec.capture.model
    model.eval()  # dropout would look like mixing
    with _on_random_states(spec) as (weights, output, _):
        hidden_BTD = last_hidden(output)[:, :_TOKENS]
        together = spec.logits(weights, hidden_BTD)
        alone = [spec.logits(weights, token[None, None])[0] for token in hidden_BTD.flatten(0, 1)]
    model.train()
    if not torch.allclose(together.flatten(0, 1), torch.cat(alone), 1e-4, 1e-5, equal_nan=True):
        raise Unsupported(
            "its head computes a token's logits from other tokens too, or from its place in the "
            "row; such a head is not supported"
        )
