"""Tiny models, uneven micro-batches, and what the tests read off an engine."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config
from transformers.models.qwen2 import Qwen2ForCausalLM

from megatrain import Engine, Placement
from megatrain.device import Buffer, CpuDevice
from megatrain.loss import CROSS_ENTROPY
from megatrain.model.fingerprint import Reader, value_of
from megatrain.model.unsupported import refuse_hooks
from megatrain.source.source import Source, open_source
from tests.families.plain import Results, Step, accumulate, go_on
from tests.families.tiny import decoder_sizes, tiny_model
from tests.inside import host_gradients, store_of
from tests.rules import SWEPT

VOCAB = 128
SHAPES = ((2, 12), (1, 7), (3, 5))

SIZES = decoder_sizes(VOCAB, 32, 48, 3, 4, 2) | {"max_position_embeddings": 64}


def llama(**changes: Any) -> LlamaForCausalLM:
    """Every weight strong enough that no part of a layer hides a wrong gradient."""
    torch.manual_seed(0)
    return noisy(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})))


def model_of(family: str) -> Any:
    """A tiny model of a family of transformers; of Llama's, the one above."""
    return llama() if family == "llama" else tiny_model(family)


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    """As `llama`, with biases of queries, keys and values."""
    torch.manual_seed(0)
    return noisy(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})))


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """`model` as it is loaded in `dtype`: a cast would round what the class computes, too."""
    made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    made.load_state_dict(model.state_dict())
    return made


def noisy(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.15)
    return model


def make_batches(
    count: int, shapes: Sequence[tuple[int, int]] = SHAPES, seed: int = 0
) -> list[Step]:
    """`count` steps of micro-batches `[rows, tokens]`, a fifth of their labels ignored."""
    generator = torch.Generator().manual_seed(seed)

    def micro_batch(shape: tuple[int, int]) -> dict[str, Tensor]:
        ids = torch.randint(10, VOCAB - 10, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < 0.2
        ignored[:, 1:2] = False  # no row is without a label, if it can have one
        return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}

    return [[micro_batch(shape) for shape in shapes] for _ in range(count)]


def replies(loss: Any) -> Step:
    """Six replies in uneven micro-batches, chosen and rejected in turn, with what `loss` takes."""
    [step] = make_batches(1)
    generator, number = torch.Generator().manual_seed(5), 0
    for micro in step:
        ids = micro["input_ids"]
        numbers = torch.arange(number, number + len(ids))[:, None].expand(ids.shape)
        number += len(ids)
        micro["labels"] = micro["labels"].masked_fill(torch.arange(ids.shape[1]) < 2, -100)
        micro |= {"chosen": (numbers < 3).float(), "pair": (numbers % 3).float()}
        micro["reference_logp"] = -7 + torch.randn(ids.shape, generator=generator)
        micro |= {"example": numbers.float(), "advantage": torch.ones(ids.shape)}
        micro["old_logp"] = torch.full(ids.shape, -5.0)
    return [{n: m[n] for n in ("input_ids", "labels", *loss.inputs)} for m in step]


def padded(step: Step) -> Step:
    """The step with a mask that hides the end of its first rows, which have no labels there."""
    mask = torch.ones_like(step[0]["input_ids"])
    mask[0, 7:] = 0
    labels = step[0]["labels"].masked_fill(mask == 0, -100)
    return [step[0] | {"attention_mask": mask, "labels": labels}, *step[1:]]


# Options of an engine on which the examination of its model does not depend.
OPENED_ALIKE = {"placement", "device", "disk", "disk_space", "seed", "verify", "group"}
_opened: dict[Any, Source] = {}


def opened(model: PreTrainedModel, precision: str) -> Any:
    """The model as an engine opens it; models that differ in weights alone are examined once.

    That is two thirds of the time to open a tiny engine. An engine must not change the layers that
    it runs, by compiling them or by running parts of them in tiles.
    """
    refuse_hooks(model)
    reader, kinds = Reader(model), {type(module) for module in model.modules()}
    key = precision, reader.of(model), frozenset((kind, kind.forward) for kind in kinds)
    key += tuple(p.dtype for p in model.parameters()), tuple(map(value_of, model.buffers()))
    if reader.strays:
        return model
    if key not in _opened:
        _opened[key] = replace(open_source(model), in_memory=None)
    return replace(_opened[key], in_memory=model)


def make_engine(
    model: Any, *, clip: float | None = 1.0, precision: Any = "fp32", lr: float = 1e-2, **options
) -> Engine:
    """An engine on the CPU; `rule` names its optimizer.

    A large eps lets a wrong scale of the gradient show, and so do momenta of Lion.
    """
    eps, rule = options.pop("eps", 1e-3), options.pop("rule", "adamw")
    settings: dict[str, Any] = {"lr": lr / 10 if rule == "lion" else lr}
    if "eps" in SWEPT[rule]().settings:
        settings["eps"] = eps
    optimizer = SWEPT[rule](**settings)
    placement = options.get("placement", Placement())
    on_disk = getattr(placement, "on_disk", False)
    options = {"device": "cpu", "disk": gettempdir() if on_disk else None} | options
    changed = (getattr(placement, name, None) for name in ("compile", "chunk_tokens"))
    alike = {*options} <= OPENED_ALIKE and precision != "fp8" and not any(changed)
    if isinstance(model, PreTrainedModel) and alike:
        model = opened(model, precision)
    return Engine(model, optimizer=optimizer, max_grad_norm=clip, precision=precision, **options)


def masters(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.named_masters())


def trained(model: Any, steps: list[Step], **options: Any) -> Results:
    """Losses and norms of steps of an engine of its own, and the masters after them."""
    with make_engine(model, **options) as engine:
        return go_on(engine, steps)


def moments(engine: Engine) -> list[Tensor]:
    return [m.values().clone() for tile in store_of(engine).tiles for m in tile.states.values()]


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Those of the last step: with clipping, each tile has room of its own that keeps them."""
    host_grads = host_gradients(engine)
    return {
        entry.name: entry.view(host_grads[tile.index].buffer.data).clone()
        for tile in store_of(engine).tiles
        for entry in tile.layout.trainable
    }


def resumes(
    engine: Engine, folder: Any, steps: list[Step], loss: Any = CROSS_ENTROPY, **options: Any
) -> None:
    """That an engine which is saved in `folder` now goes on there with `steps`, to the bit.

    Args: `options`: with which it is loaded.
    """
    engine.save(folder)
    results, trained = [engine.step(step, loss) for step in steps], masters(engine)
    with Engine.load(folder, device="cpu", **options) as again:
        for step, wanted in zip(steps, results, strict=True):
            result = again.step(step, loss)
            assert (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert result.measures == wanted.measures
        assert same(masters(again), trained)


def begun_adapter(model: PreTrainedModel, task: str, folder: Any) -> Any:
    """A model with an adapter for PEFT's `task` that has learnt something; its adapter is saved."""
    keys = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    adapted = get_peft_model(model, LoraConfig(task_type=task, **keys))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder)
    return adapted


def plain_gradients(model: PreTrainedModel, step: Step) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain torch; zero where none arrives."""
    model.train()
    model.zero_grad()
    return accumulate(model, step), slopes(model)


def slopes(model: Any) -> dict[str, Tensor]:
    """The gradients that plain torch has left in a model; zero where none has arrived."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def assert_step(
    engine: Engine,
    step: Step,
    wanted: tuple[float, dict[str, Tensor]],
    loss: Any = CROSS_ENTROPY,
    error: float = 2e-6,
) -> Any:
    """That a step has the loss and gradients of plain torch; returns its result."""
    result, got = engine.step(step, loss), gradients(engine)
    assert result.loss == pytest.approx(wanted[0], rel=1e-6)
    assert got.keys() == wanted[1].keys()
    assert relative_error(got, wanted[1]) < error
    return result


class Counting(TorchDispatchMode):
    """Counts the operations of which `chosen(function, arguments)` holds."""

    def __init__(self, chosen: Callable[[Any, tuple[Any, ...]], bool]) -> None:
        super().__init__()
        self.chosen, self.count = chosen, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.chosen(func, args)
        return func(*args, **(kwargs or {}))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of named tensors are the same bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def relative_error(
    got: dict[str, Tensor], wanted: dict[str, Tensor], origin: dict[str, Tensor] | None = None
) -> float:
    """The largest error of a tensor by its norm, or by that of its way from `origin`."""
    errors = []
    for name, target in wanted.items():
        whole = target if origin is None else target - origin[name]
        error = (got[name] - target).norm()
        errors.append(float(error / whole.norm()) if error else 0.0)
    return max(errors)


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def frozen(model: Any, unless: Callable[[str], bool]) -> Any:
    """`model` with every parameter frozen but those whose names `unless` accepts."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(unless(name))
    return model


class Noting(CpuDevice):
    """Notes how much device memory is taken for what."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.taken[name] = numel * dtype.itemsize
        return super().empty(name, numel, dtype)
