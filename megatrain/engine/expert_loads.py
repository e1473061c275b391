"""After a step: measures of the experts' loads, a warning if some starve, moves of routers' biases.

Legend: L layers with a router, E experts.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.device.base import COMPUTE
from megatrain.model.spec import ModelSpec

STARVED = 0.1  # an expert with less than this part of an even share of a layer's choices starves
WINDOW = 20  # steps over which loads are averaged for the warning

_log = logging.getLogger(__name__)


class ExpertLoads:
    """Measures the experts' loads after each step, and moves the routers' biases."""

    def __init__(self, device: Device, spec: ModelSpec, buffers: dict[str, Tensor]) -> None:
        """Args: `buffers`: by name, the model's buffers as saves and exports write them."""
        self._device, self._spec, self._buffers = device, spec, buffers
        self._window: list[Tensor] = []  # loads `[L, E]` of fewer than WINDOW steps; 1: even

    def after_step(self, pass_loads: Sequence[Tensor]) -> dict[str, float]:
        """After a step, move the biases by its passes' loads `[L, E]`; return measures of loads."""
        work = partial(self._move_biases, pass_loads)
        loads_LE = self._device.run(COMPUTE, "loads of experts", work)
        if loads_LE is None or not loads_LE.sum():
            return {}
        share_LE = loads_LE / loads_LE.mean(1, keepdim=True)
        self._window.append(share_LE)
        if len(self._window) == WINDOW:
            mean_LE, self._window = torch.stack(self._window).mean(0), []
            starved_L = (mean_LE < STARVED).sum(1)
            if starved_L.any():
                worst = int(starved_L.argmax())
                layer = self._spec.layers[self._spec.routed[worst].visit]
                _log.warning(
                    "%d of %d experts starve: less than %.0f %% of an even share of the choices of "
                    "the last %d steps (most in %s: %d of %d); see router_bias_update, "
                    "router_aux_loss_coef",
                    starved_L.sum(), mean_LE.numel(), 100 * STARVED, WINDOW, layer.name,
                    starved_L[worst], mean_LE.shape[1],
                )  # fmt: skip
        starved = (share_LE < STARVED).double().mean()
        return {"expert_load_max": float(share_LE.max()), "experts_starved": float(starved)}

    @torch.no_grad()
    def _move_biases(self, pass_loads: Sequence[Tensor]) -> Tensor | None:
        """Move the routers' biases towards even loads; return the step's loads on the CPU."""
        if not pass_loads:
            return None
        loads_LE, loss = torch.stack([*pass_loads]).sum(0), self._spec.router_loss
        assert loss is not None
        for name, row in self._spec.router_biases.items():
            load_E, bias_E = loads_LE[row], self._spec.capture.model.get_buffer(name)
            direction_E = (load_E.sum() - len(load_E) * load_E).sign().float()
            bias_E += loss.bias_rate * direction_E
            self._buffers[name] = bias_E.cpu().clone()
        return loads_LE.cpu()
