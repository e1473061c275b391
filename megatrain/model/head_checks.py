"""Checks that a head's loss is the cross entropy of its labels, and that it mixes no tokens.

transformers' models compute a loss in their forward if they get labels. The engine computes the
loss separately, so that logits never exist as a whole; anything that a model adds to its loss would
be lost. So the head of a class of transformers, or of a folder's code, is tried on a few random
hidden states. A user's code can do more than a trial shows: its loss must be the very tensor that
transformers' loss function computes from the labels and the logits.

Random weights are random in their first values, which give logits of some tokens, and zero
elsewhere, where they take no memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.base.changed import changed
from megatrain.compat.transformers import CAUSAL_LM_CLASSES, configs
from megatrain.errors import Unsupported, in_one_line
from megatrain.loss import IGNORED, targets_of
from megatrain.model.capture import last_hidden, with_hidden
from megatrain.model.routers import RouterLoss
from megatrain.model.spec import ModelSpec
from megatrain.model.zeros import ZeroProducts, zero_pages

_SHAPE = (2, 10)
_UNLABELLED = [(0, 2), (1, 3), (1, 5)]  # row and token; the rows have different numbers of labels
_SPECIAL = [p for p in product(range(2), range(1, 10)) if p not in _UNLABELLED]  # special tokens
_RANDOM = 1 << 18  # values of a parameter that are random: tables may be larger than memory
_TOLERANCE = 1e-6  # of the loss, in fp32
_TOKENS = 2  # of each row in a trial of mixed tokens


def label_shift(spec: ModelSpec) -> int:
    """The number of tokens from logits to the label with which they are compared: 1, or 0.

    Raises Unsupported: the model has another loss than the mean cross entropy of its labels, or a
    head that is none of a language model.
    """
    model = spec.capture.model
    name, count = type(model).__name__, model.config.get_text_config(decoder=True).vocab_size
    if spec.capture.scores_rows:
        _try_scores(spec, name)
        return 0  # scores are compared at their own token
    if spec.num_logits < count and not spec.capture.classifies:
        raise Unsupported(
            f"{name} makes {spec.num_logits} numbers of a token, and its vocabulary has {count}:"
            " its head is not a language model's; give a model with one (...ForCausalLM)"
        )
    if spec.capture.embeds:
        return 0
    shift = _tried(spec, name)
    if spec.router_loss is not None:
        _try_routers(spec, spec.router_loss, shift, name)
    if shift == 0 and name not in CAUSAL_LM_CLASSES and not spec.capture.classifies:
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


def _tried(spec: ModelSpec, name: str) -> int:
    """`label_shift`, from a comparison of the model's loss with the cross entropy of its logits."""
    model, labels_BT = spec.capture.model, _labels(spec)
    function = model.loss_function
    if not _is_known(function):
        raise Unsupported(
            f"{name} defines a loss_function, which MegaTrain does not compute; remove the "
            "function, or train elsewhere"
        )
    noted: list[tuple[Tensor, Tensor, Tensor]] = []
    attributes = vars(model).copy()

    def noting(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = function(logits, labels, *args, **kwargs)
        noted.append((logits, labels, loss))
        return loss

    model.loss_function = noting
    try:
        loss, logits_BTV = _loss_of_model(spec, labels_BT)
        value = None if loss is None else float(loss)
    except Exception as error:  # whatever a model's own code makes of these labels
        raise Unsupported(
            f"the loss in {name}'s forward cannot be computed of labels [rows, tokens] alone "
            f"({in_one_line(error, 200)}), and another one is not trained; give a model whose "
            "forward can"
        ) from error
    finally:
        vars(model).clear()
        vars(model).update(attributes)
    if value is None:
        return 1
    if not _is_known(model.forward) and not any(
        logits is logits_BTV and labels is labels_BT and result is loss
        for logits, labels, result in noted
    ):
        raise Unsupported(
            f"{name}'s forward is not transformers' own, and its loss is not the result of its "
            "loss_function for the labels and the logits that it returns; let it return that"
        )
    for shift in (1, 0):
        if _same(value, _cross_entropy(logits_BTV, labels_BT, shift)):
            return shift
    raise Unsupported(
        f"the loss in {name}'s forward is not the mean cross entropy of its labels, and the "
        "difference would be left out; give a model with that loss alone"
    )


def _is_known(function: Callable[..., Any]) -> bool:
    """True if a function is of transformers, or of the code of a folder."""
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("transformers", "transformers_modules")


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
    if total is None or not _same(float(total), expected):
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
    for place, token in zip(_SPECIAL, usable, strict=False):
        labels_BT[place] = token
    for place in _UNLABELLED:
        labels_BT[place] = IGNORED
    return labels_BT


def _loss_of_model(
    spec: ModelSpec, labels_BT: Tensor, routed: tuple[Tensor, ...] = (), **more: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The loss, if any, and the logits of the model's forward on random hidden states.

    Args: `routed`: logits `[B * T, E]` of routers, whose loss is added.
    """
    with _on_random_states(spec, routed, **more) as (weights, output, inputs):
        loss, logits = spec.capture.own_loss(weights, output, inputs, labels_BT)
        return loss, spec.capture.head(weights, output, inputs) if logits is None else logits


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
    hidden = torch.randn((*_SHAPE, *width), generator=generator)
    ids_BT = torch.zeros(_SHAPE, dtype=torch.long)
    inputs = capture.inputs({"input_ids": ids_BT, **more})
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


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)


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
