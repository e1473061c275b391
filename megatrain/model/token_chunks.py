"""Runs parts of a layer that act on every token alone over tiles of tokens.

At 512 k tokens the intermediate of one MLP takes 20 GB, and autograd keeps several. A part that
acts on each token alone can run, and run again in the backward, tile by tile. A trial finds these
parts, not their names: see `acts_on_tokens_alone`.

Legend: B rows, T tokens of a row, N = B x T, D width in, E width out, C tokens of a tile.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.compat.torch import TorchDispatchMode, without_modes

Run = Callable[[dict[str, Tensor], Tensor], Tensor]
Compiler = Callable[[Callable[..., Any], str], Callable[..., Any]]

_TRIAL_SHAPE = (2, 64)  # rows, tokens
_CHANGED = ((0, 0), (0, 63), (1, 31))  # rows and tokens that are changed, one after the other
_SHORT, _OFFSET = 24, 7  # tokens of a shorter trial, and their place in the row

_OTHER_KERNELS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest rounding error of other kernels, for fewer tokens; of the largest value."""


def parts(module: nn.Module, names: Collection[str] | None = None) -> list[nn.Module]:
    """Modules that may run in tiles; `names`: only modules with parameters, all among these."""
    usable = []
    for name, part in module.named_modules():
        full_names = {f"{name}.{parameter}" for parameter, _ in part.named_parameters()}
        is_named = names is None or (bool(full_names) and full_names.issubset(names))
        # Tiles spare nothing of a linear map or an activation, which keep only their input.
        own = list(part.parameters(recurse=False))
        is_norm = bool(own) and all(parameter.ndim <= 1 for parameter in own)
        spares_memory = is_norm or any(True for _ in part.children())
        replaced = [vars(m)["forward"] for m in part.modules() if vars(m).get("forward")]
        is_usual = all(isinstance(forward, ChunkedOverTokens) for forward in replaced)
        if name and is_named and spares_memory and is_usual:
            usable.append(part)
    return usable


class ChunkedOverTokens:
    """A forward that runs a part over tiles, if a trial shows that it acts on tokens alone."""

    without_data = False  # True: meta tensors are tiled as well

    def __init__(self, part: nn.Module, tokens: int, compiled: Compiler) -> None:
        self._part, self._tokens = part, tokens
        self._whole = part.forward
        with without_modes():  # a forecast's mode would copy buffers without data
            self._alone = copy.deepcopy(part)  # before parts inside get such forwards
        self._alone.__dict__.pop("forward", None)
        name = type(part).__name__
        self._fast = {
            mode: compiled(_apply, f"{name} of a tile ({mode})") for mode in ("forward", "backward")
        }
        self._acts_on_tokens_alone: dict[tuple[bool, int, torch.dtype], bool] = {}

    def __deepcopy__(self, memo: dict) -> "ChunkedOverTokens":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.ndim != 3 or (x.is_meta and not self.without_data):
            return self._whole(*args, **kwargs)
        if x.shape[0] * x.shape[1] <= self._tokens:
            return self._whole(x)
        named_tensors = [*self._part.named_parameters(), *self._part.named_buffers()]
        # Weights that are kept as codes are meta tensors here, and not passed.
        bound = {name: t for name, t in named_tensors if self.without_data or not t.is_meta}
        key = (self._part.training, x.shape[-1], x.dtype)
        if key not in self._acts_on_tokens_alone:
            self._alone.train(self._part.training)
            with without_modes():
                self._acts_on_tokens_alone[key] = self._trial(bound, x)
        return self._over_tiles(bound, x) if self._acts_on_tokens_alone[key] else self._whole(x)

    def _trial(self, bound: dict[str, Tensor], x: Tensor) -> bool:
        """True if the part acts on every token alone; forecast/measure.py overrides this."""
        return acts_on_tokens_alone(partial(_apply, self._alone, bound), x)

    def _over_tiles(self, bound: dict[str, Tensor], x: Tensor) -> Tensor:
        return _Tiles.apply(self._call, self._tokens, list(bound), x, *bound.values())

    def _call(self, bound: dict[str, Tensor], x: Tensor) -> Tensor:
        """The result of one tile; a last tile that is shorter is not compiled."""
        self._alone.train(self._part.training)
        if x.shape[1] < self._tokens:
            return _apply(self._alone, bound, x)
        mode = "backward" if torch.is_grad_enabled() else "forward"
        return self._fast[mode](self._alone, bound, x)


def _apply(part: nn.Module, bound: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(part, bound, (x,))


class _Tiles(torch.autograd.Function):
    """`run` over tiles of tokens; the backward computes each tile again."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, tokens: int, names: list[str], x_BTD: Tensor, *values: Tensor
    ) -> Tensor:
        ctx.run, ctx.tokens, ctx.names = run, tokens, names
        ctx.save_for_backward(x_BTD, *values)
        # Detached tensors of all layers pass the guards of one compiled function.
        bound = {name: value.detach() for name, value in zip(names, values, strict=True)}
        x_ND = x_BTD.detach().reshape(-1, x_BTD.shape[-1])
        out_NE: Tensor | None = None
        with without_modes(), torch.no_grad():
            for rows in _tiles(len(x_ND), tokens):
                out_CE = run(bound, x_ND[rows][None].detach())[0]
                if out_NE is None:
                    out_NE = out_CE.new_empty(len(x_ND), out_CE.shape[-1])
                out_NE[rows] = out_CE
        assert out_NE is not None
        return out_NE.view(*x_BTD.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *values = ctx.saved_tensors
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        gradient_NE = gradient_BTE.reshape(-1, gradient_BTE.shape[-1])
        pairs = list(zip(values, ctx.needs_input_grad[4:], strict=True))
        # Summed in fp32, so that a weight's gradient is rounded once, as without tiles.
        sums = [torch.zeros_like(x, dtype=torch.float32) if need else None for x, need in pairs]
        needed_sums = [total for total in sums if total is not None]
        dx_ND = torch.empty_like(x_ND)
        for rows in _tiles(len(x_ND), ctx.tokens):
            x_CD = x_ND[rows][None].detach().requires_grad_()
            leaves = [value.detach().requires_grad_(need) for value, need in pairs]
            with torch.enable_grad():
                out_CE = ctx.run(dict(zip(ctx.names, leaves, strict=True)), x_CD)
            sources = [x_CD, *(leaf for leaf in leaves if leaf.requires_grad)]
            dx_CD, *grads = torch.autograd.grad(
                out_CE, sources, gradient_NE[rows][None], allow_unused=True, materialize_grads=True
            )
            dx_ND[rows] = dx_CD[0]
            for total, grad in zip(needed_sums, grads, strict=True):
                total.add_(grad)
        of_values = zip(sums, values, strict=True)
        rounded = [total if total is None else total.to(value.dtype) for total, value in of_values]
        return None, None, None, dx_ND.view_as(x_BTD), *rounded


def _tiles(total: int, tokens: int) -> Iterator[slice]:
    return (slice(start, start + tokens) for start in range(0, total, tokens))


class _OnlyFloats(TorchDispatchMode):
    """Notes if an operation makes integers or bools, as a choice among tokens does."""

    only_floats = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        if any(isinstance(x, Tensor) and not x.is_floating_point() for x in results):
            self.only_floats = False
        return result


def acts_on_tokens_alone(run: Callable[[Tensor], Any], like_BTD: Tensor) -> bool:
    """True if `run` computes `[B, T, E]` from `[B, T, D]`, each token by itself.

    This is tried on random tokens: a changed token must not change a bit of another's result; fewer
    tokens must give the same up to rounding; no random numbers and no integers (an index, a choice
    of experts) may occur. A part that fails in any way does not act on tokens alone.
    """
    generator = torch.Generator(like_BTD.device).manual_seed(0)
    shape = (*_TRIAL_SHAPE, like_BTD.shape[-1])
    x = torch.randn(shape, generator=generator, device=like_BTD.device).to(like_BTD.dtype)
    try:
        # First of all, as random numbers here would differ from those of the backward.
        if draws(lambda: run(x), {"x": x}):
            return False
        with torch.no_grad(), _OnlyFloats() as watch:
            out = run(x)
        fits = isinstance(out, Tensor) and out.ndim == 3 and out.shape[:2] == _TRIAL_SHAPE
        if not fits or not watch.only_floats:
            return False
        # Tokens from the middle of a row show if their place counts.
        middle = (slice(1, 2), slice(_OFFSET, _OFFSET + _SHORT))
        bound = _OTHER_KERNELS.get(x.dtype, 1e-4) * float(out.abs().max())
        with torch.no_grad():
            short = run(x[middle])
            return _independent(run, x, out) and bool(((short - out[middle]).abs() <= bound).all())
    except Exception:
        return False


def _independent(run: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor) -> bool:
    """True if another value of one token changes the result `whole` of that token alone."""
    for row, token in _CHANGED:
        changed = x.clone()
        changed[row, token] = -2 * changed[row, token] + 1
        differs = (run(changed) != whole).any(-1)
        if not differs[row, token] or int(differs.sum()) != 1:
            return False
    return True


def draws(function: Callable[[], Any], tensors: Mapping[str, Tensor]) -> bool:
    """True if a call uses torch's random numbers, whose state is restored afterwards.

    Args: `tensors`: some of the call's inputs; they name its device.
    """
    devices = (tensor.device for tensor in tensors.values() if not tensor.is_meta)
    device = next(devices, torch.device("cpu"))
    forked = [] if device.type == "cpu" else [device]

    def states() -> list[Tensor]:
        modules = map(torch.get_device_module, forked)
        return [torch.get_rng_state(), *(module.get_rng_state(device) for module in modules)]

    with torch.random.fork_rng(forked, device_type=device.type), torch.no_grad():
        before = states()
        function()
        return not all(map(torch.equal, before, states()))
