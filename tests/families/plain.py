"""Training in plain PyTorch: what the engine must reproduce.

Shapes: B rows, T tokens, V vocabulary. A step is a list of micro-batches, each a dictionary of
int64 tensors [B, T].
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from megatrain import Engine
from megatrain.kernels.states import (
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    random16,
    stochastic_round,
)

# The patterns of transformers.Trainer.get_decay_parameter_names (transformers 5.23).
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

# A large eps keeps gradients that are zero but for rounding (the bias of keys under softmax) from
# becoming whole Adam steps, and lets a wrong scale of the gradient show: with a small eps the same
# training with its micro-batches in another order differs from itself by up to a tenth of a step.
LR, EPS = 1e-2, 1e-3

# Their forward compares logits with the labels of the same places; all others shift labels.
UNSHIFTED = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart"),
    *("mvp", "pegasus", "plbart", "trocr", "whisper", "xlnet"),
)

# (rows, tokens) of each micro-batch of each step; the last one of a step has no mask.
SHAPES = [[(2, 12), (3, 7), (1, 16)], [(1, 9), (2, 16), (2, 5)], [(3, 11), (1, 6), (2, 8)]]

Step = list[dict[str, Tensor]]


def make_steps(config: PreTrainedConfig) -> list[Step]:
    """Three steps of three uneven micro-batches: right padding, ignored labels, one without mask.

    Token ids keep clear of both ends of the vocabulary, where special tokens are.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        [_micro_batch(config, *shape, i < len(step) - 1, generator) for i, shape in enumerate(step)]
        for step in SHAPES
    ]


def _micro_batch(
    config: PreTrainedConfig, rows: int, tokens: int, masked: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    vocab = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(10, vocab - 10, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[torch.rand(rows, tokens, generator=generator) < 0.2] = -100
    if not masked:
        return {"input_ids": ids, "labels": labels}
    lengths = torch.randint(tokens // 2 + 1, tokens + 1, (rows,), generator=generator)
    padding = torch.arange(tokens) >= lengths[:, None]
    ids[padding] = getattr(config.get_text_config(decoder=True), "pad_token_id", None) or 0
    labels[padding] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": (~padding).long()}


Parts = Callable[[Any, Any], Iterator[Tensor]]
Results = tuple[list[tuple[float, float]], dict[str, Tensor]]


def go_on(engine: Engine, steps: list[Step]) -> Results:
    """Losses and norms of an engine's steps, and the masters after them."""
    results = [engine.step(step) for step in steps]
    return [(r.loss, r.grad_norm) for r in results], dict(engine.named_masters())


@dataclass
class Trained:
    """What plain training gave.

    Attributes:
        losses, norms: of every step; the norm is that before clipping.
        parameters: by name, after the last step.
        gradients: by name, of the first step, before clipping; None where none arrived.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def plain_training(model: PreTrainedModel, steps: list[Step], **settings: Any) -> Trained:
    """Train a copy of `model` with torch's AdamW, with the settings of `train_in_place`."""
    return train_in_place(copy.deepcopy(model), steps, **settings)


def train_in_place(
    model: PreTrainedModel,
    steps: list[Step],
    *,
    max_grad_norm: float | None = 1.0,
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    change: Callable[[int, torch.optim.Optimizer], None] = lambda index, optimizer: None,
    parts: Parts | None = None,
    **rates: float,
) -> Trained:
    """As `plain_training`, of `model` itself: what a copy would lose is there.

    Args: `schedule`: makes what sets rates after each step; `change`: is called before each step;
        `parts`: as `shares`, of another loss; `rates`: of AdamW.
    """
    model.train()
    optimizer = _adamw(model, **rates)
    scheduler = schedule(optimizer)
    losses, norms, gradients = [], [], {}
    for index, step in enumerate(steps):
        change(index, optimizer)
        losses.append(accumulate(model, step, parts))
        _zero_idle(model)
        if not gradients:
            gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        bound = math.inf if max_grad_norm is None else max_grad_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=False)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return Trained(losses, norms, parameters, gradients)


def _zero_idle(model: PreTrainedModel) -> None:
    """Zero gradients for what is idle in a layer that runs, such as an expert without tokens.

    torch would leave such a parameter alone (no decay, no decaying moments) depending on the
    step's tokens; here and in the engine an idle expert has a gradient, and it is zero. Parameters
    outside of running layers (a tower that text does not use) have none, as in torch.
    """
    named = list(model.named_parameters())
    running = {_layer(name) for name, p in named if p.grad is not None} - {None}
    for name, parameter in named:
        if parameter.requires_grad and parameter.grad is None and _layer(name) in running:
            parameter.grad = torch.zeros_like(parameter)


def _layer(name: str) -> str | None:
    """The outermost numbered module that a parameter is in."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else None


def accumulate(model: PreTrainedModel, step: Step, parts: Parts | None = None) -> float:
    """Gradients of the mean loss over all labelled tokens of the step; returns that loss."""
    total = 0.0
    for loss in (parts or shares)(model, step):
        loss.backward()
        total += loss.item()
    return total


def shares(model: PreTrainedModel, step: Step) -> Iterator[Tensor]:
    """Each micro-batch's share of the mean loss over all labelled tokens of the step."""
    shift = 0 if model.config.model_type in UNSHIFTED else 1
    tokens = sum(int((batch["labels"][:, shift:] != -100).sum()) for batch in step)
    for batch in step:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits_BTV = model(**inputs, use_cache=False).logits.float()
        yield token_loss(logits_BTV, batch["labels"], shift) / tokens


def token_loss(logits_BTV: Tensor, labels_BT: Tensor, shift: int = 1) -> Tensor:
    """Summed cross entropy of each labelled token given the tokens before it."""
    return nn.functional.cross_entropy(
        logits_BTV[:, : logits_BTV.shape[1] - shift].flatten(0, 1),
        labels_BT[:, shift:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


class PlainLion(torch.optim.Optimizer):
    """Lion parameter by parameter, as algorithm 2 of the paper reads."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = torch.sign(m * beta1 + p.grad * (1 - beta1))
                p.copy_(p * (1 - lr * group["weight_decay"]) - lr * direction)
                m.copy_(m * beta2 + p.grad * (1 - beta2))


class PlainSGD(torch.optim.SGD):
    """torch's SGD (torch 2.13, `_single_tensor_sgd`), with each operation rounded once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g = p.grad + p * group["weight_decay"]
                if group["momentum"]:
                    fresh = g * (1 - group["dampening"])
                    buffer = self.state[p].get("momentum_buffer")
                    buffer = g if buffer is None else buffer * group["momentum"] + fresh
                    self.state[p]["momentum_buffer"] = buffer.clone()
                    g = g + buffer * group["momentum"] if group["nesterov"] else buffer
                p.sub_(g * group["lr"])


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW as torch has it, with one quotient less, and moments rounded to `states` in each step.

    Attributes:
        at: number of each parameter's first element in the engine, for random numbers; 0 if absent.
    """

    def __init__(self, params: Any, states: str, **settings: Any):
        self.states, self.at, self.steps = states, {}, 0
        super().__init__(params, {"weight_decay": 0.01, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            root = math.sqrt(1 - beta2**self.steps)
            size = -(lr / (1 - beta1**self.steps)) * root
            for p in (p for p in group["params"] if p.grad is not None):
                state, g = self.state[p], p.grad
                m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v"))
                p.mul_(1 - lr * group["weight_decay"])
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                p.addcdiv_(m, v.sqrt().add_(group["eps"] * root), value=size)
                self._round(p, m.view(-1), v.view(-1))

    def _round(self, p: Tensor, m: Tensor, v: Tensor) -> None:
        if self.states == "int8":
            m.copy_(decode_first(*encode_first(m)))
            v.copy_(decode_second(*encode_second(v)))
        else:
            chances = random16(self.at.get(p, 0), len(m), self.steps, m.device)
            for moment, chance in zip((m, v), chances, strict=True):
                moment.copy_(stochastic_round(moment.clone(), chance))


def _adamw(
    model: PreTrainedModel, lr: float = LR, eps: float = EPS, weight_decay: float = 0.1
) -> torch.optim.AdamW:
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in named if n in decayed], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps, foreach=False, fused=False)
