"""The engine against plain torch, for one model at a time.

How sharp the check is. Both sides compute in fp32 on the CPU and take three clipped AdamW steps of
three uneven micro-batches. Every parameter must end within `UPDATE_TOLERANCE` of its own update's
norm, and every gradient of the first step within `GRADIENT_TOLERANCE` of its own norm, so that a
gradient that is wrong but small cannot hide behind a large one.

Some cannot: their gradient is zero but for rounding (the bias of keys under a softmax), or Adam
divides it by a tiny second moment. There, and nowhere else, the error may be twice that by which
plain torch differs from *itself* when the same mathematics is done another way (`alternatives`).
Such parameters are counted, and the count is in docs/models.md. The same holds for norms, and for
the losses after the first step, whose weights such parameters are among. Nor is a parameter held to
less than the last bit of its largest value: of weights near 1 that were moved by 0.005 the
tolerance is smaller than the step from one number to the next, which processors take at other
places.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import AdamW, Engine, Placement
from megatrain.compat.transformers import encoders
from megatrain.model.trained import Trained as Chosen
from megatrain.source.source import Source
from tests.families.plain import EPS, LR, Step, Trained, make_steps, plain_training

LOSS_TOLERANCE = 1e-6
UPDATE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-6

# Plain torch's gradients that differ from themselves by this share of their norm are rounding and
# nothing else; they need only be as small, beside the whole gradient, as the tolerance.
ONLY_ROUNDING = 0.01

NUDGES = 3  # a parameter of one element needs several to show how far it may stray

# One Adam step with an enormous eps is a gradient step of this rate: the masters tell the gradient.
PROBE_RATE, PROBE_EPS = 1e12, 1e12


@dataclass
class Errors:
    """Differences between the engine and plain torch.

    Attributes:
        loss, norm: largest relative error of a step's loss, and of its gradient norm.
        first: the first step's loss.
        own: relative error of a micro-batch's loss, by the loss of the model's own forward.
        update: largest error of a parameter that is held to the tolerance, by its update's norm.
        gradient: the same of the first step's gradients, by their norms.
        noisy: parameters that plain torch itself does not determine to the tolerance.
        failures: what is out of tolerance.
    """

    loss: float = 0.0
    norm: float = 0.0
    first: float = 0.0
    own: float = 0.0
    update: float = 0.0
    gradient: float = 0.0
    noisy: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """Plain training of a model, and the same done in other ways."""

    model: PreTrainedModel
    steps: list[Step]
    max_grad_norm: float | None

    def __post_init__(self) -> None:
        self.initial = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.trained = self._train(self.model, self.steps)
        self._tried: list[Trained] = []

    def _train(self, model: PreTrainedModel, steps: list[Step]) -> Trained:
        return plain_training(model, steps, max_grad_norm=self.max_grad_norm)

    @cached_property
    def _ways(self) -> list[Callable[[], Trained]]:
        """Weights moved by a last bit; rows reversed and masks of ones; micro-batches reversed.

        A mask of ones means what no mask means, but takes attention through another kernel.
        """
        turned = [[_turned(batch) for batch in step] for step in self.steps]
        backwards = [list(reversed(step)) for step in self.steps]
        return [
            *(partial(self._nudged, seed) for seed in range(NUDGES)),
            partial(self._train, self.model, turned),
            partial(self._train, self.model, backwards),
        ]

    def _nudged(self, seed: int) -> Trained:
        model, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + sign * torch.finfo(torch.float32).eps)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        trained = self._train(model, self.steps)
        for name, values in trained.parameters.items():
            values += self.initial[name] - start[name]
        return trained

    def noise(self, value: Callable[[Trained], Tensor | None], needed: float) -> float:
        """By how much `value` differs between the ways; no more are tried than make it `needed`."""
        noise = 0.0
        for place, way in enumerate(self._ways):
            if noise >= needed:
                break
            if place == len(self._tried):
                self._tried.append(way())
            noise = max(noise, _distance(value(self._tried[place]), value(self.trained)))
        return noise


def compare(
    model: PreTrainedModel | Source,
    placement: Placement | str = "auto",
    max_grad_norm: float | None = 1.0,
    steps: list[Step] | None = None,
    chosen: Chosen | None = None,
) -> Errors:
    """Train copies of `model` both ways, on text or on `steps`.

    Args: `model`: also opened, and so examined once; not if `placement` runs its head in chunks;
        `chosen`: which parameters are trained, by their names.

    Raises:
        Unsupported: the engine refuses the model.
    """
    if chosen is not None:
        model = _with_trained(model, chosen)
    opened, model = model, model.in_memory if isinstance(model, Source) else model
    steps = steps or make_steps(model.config)
    options = {"precision": "fp32", "device": "cpu", "placement": placement}
    settings = AdamW(lr=LR, eps=EPS)
    with Engine(opened, optimizer=settings, max_grad_norm=max_grad_norm, **options) as engine:
        own = engine.evaluate(steps[0][:1])
        results = [engine.step(step) for step in steps]
        masters = dict(engine.named_masters())
    probe = AdamW(lr=PROBE_RATE * PROBE_EPS, eps=PROBE_EPS, weight_decay=0.0)
    with Engine(opened, optimizer=probe, max_grad_norm=None, **options) as engine:
        engine.step(steps[0])
        moved = dict(engine.named_masters())
    reference = Reference(model, steps, max_grad_norm)
    errors = Errors(first=results[0].loss)
    with torch.no_grad():  # what its own forward makes of labels
        wanted = copy.deepcopy(model).eval()(**steps[0][0], use_cache=False).loss.item()
    errors.own = abs(own - wanted) / wanted
    if not errors.own <= LOSS_TOLERANCE:
        errors.failures.append(f"loss of the model's own forward off by {errors.own:.1e}")
    compare_steps(errors, results, reference)
    compare_updates(errors, masters, reference)
    _compare_gradients(errors, moved, reference)
    return errors


def _with_trained(model: PreTrainedModel, chosen: Chosen) -> PreTrainedModel:
    """A copy that is trained as one from a folder: without its encoders, unless they are named."""
    model = copy.deepcopy(model)
    for encoder in encoders(model) if chosen.train_only is None else []:
        encoder.requires_grad_(False)
    chosen.choose(model)
    return model


def compare_steps(errors: Errors, results: list, reference: Reference) -> None:
    trained = reference.trained
    wanted = zip(results, trained.losses, trained.norms, strict=True)
    for index, (result, loss, norm) in enumerate(wanted):
        away = abs(result.loss - loss)
        off = away / abs(loss)
        errors.loss = max(errors.loss, off)
        errors.norm = max(errors.norm, abs(result.grad_norm - norm) / norm)
        if not off <= LOSS_TOLERANCE:
            noise = reference.noise(
                lambda t, i=index: torch.tensor(t.losses[i], dtype=torch.double), away / 2
            )
            if index == 0 or not away <= 2 * noise:
                text = f"loss of step {index + 1} off by {off:.1e} (noise {noise / abs(loss):.1e})"
                errors.failures.append(text)
    if not errors.norm <= UPDATE_TOLERANCE:
        norms = torch.tensor(trained.norms)
        noise = reference.noise(lambda t: torch.tensor(t.norms) / norms, errors.norm / 2)
        if not errors.norm <= 2 * noise:
            errors.failures.append(f"gradient norm off by {errors.norm:.1e} (noise {noise:.1e})")


def compare_updates(errors: Errors, masters: dict[str, Tensor], reference: Reference) -> None:
    assert masters.keys() == reference.initial.keys()
    for name, target in reference.trained.parameters.items():
        error = _distance(masters[name], target)
        update = _distance(target, reference.initial[name])
        if error <= UPDATE_TOLERANCE * update:
            errors.update = max(errors.update, error / update if error else 0.0)
            continue
        errors.noisy.add(name)
        if error <= torch.finfo(torch.float32).eps * target.abs().max().item():
            continue
        noise = reference.noise(lambda t, name=name: t.parameters[name], error / 2)
        if not error <= 2 * noise:
            errors.failures.append(
                f"{name} off by {error:.1e} (update {update:.1e}, noise {noise:.1e})"
            )


def _compare_gradients(errors: Errors, moved: dict[str, Tensor], reference: Reference) -> None:
    rounding = GRADIENT_TOLERANCE * reference.trained.norms[0]
    for name, target in reference.trained.gradients.items():
        start = reference.initial[name].double()
        gradient = (start - moved[name].double()) / PROBE_RATE
        if target is None:
            if bool((gradient != 0).any()):
                errors.failures.append(f"{name} has a gradient; in torch it has none")
            continue
        error, norm = _distance(gradient, target), target.norm().item()
        if error <= GRADIENT_TOLERANCE * norm:
            errors.gradient = max(errors.gradient, error / norm if error else 0.0)
            continue
        errors.noisy.add(name)
        needed = min(error / 2, ONLY_ROUNDING * norm) if error <= rounding else error / 2
        noise = reference.noise(lambda t, name=name: t.gradients[name], needed)
        if not noise >= needed:
            errors.failures.append(
                f"gradient of {name} off by {error:.1e} (norm {norm:.1e}, noise {noise:.1e})"
            )


def _turned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows in another order; those of media, which do not say their row, in the same one."""
    whole = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
    rows = len(batch["input_ids"])
    if any(len(value) != rows or value.is_floating_point() for value in batch.values()):
        return whole
    return {name: value.flip(0) for name, value in whole.items()}


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()
