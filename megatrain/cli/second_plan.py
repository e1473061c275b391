"""The second model of a run file, as a plan counts it: a streamed reference, or a teacher."""

from typing import TYPE_CHECKING

from megatrain.base.units import gib
from megatrain.cli.models import NamedModel, model_of_run
from megatrain.errors import DoesNotFit
from megatrain.forecast.second_model import second_needs
from megatrain.forecast.simulate import CPU_PROCESS_BYTES, PROCESS_BYTES
from megatrain.forecast.workload import Second, Workload
from megatrain.machine import Machine

if TYPE_CHECKING:
    from megatrain.config import Config


def streamed_with(named: NamedModel, run: "Config") -> Second | None:
    """What is streamed before each step of a run; None: nothing is."""
    if run.loss.reference == "streamed":
        return Second("reference model", named.spec())
    if run.loss.teacher_log_probs == "streamed":
        return Second("teacher", _teacher(run).spec())
    return None


def check_kept_teacher(run: "Config", machine: Machine, workload: Workload) -> str | None:
    """What a plan says of a teacher that is asked before the model is there; None: there is none.

    Raises:
        DoesNotFit: it alone is too large for the machine.
    """
    if run.loss.teacher_log_probs != "kept":
        return None
    needs = second_needs(_teacher(run).spec(), workload.dtype, workload.tokens_per_step)
    host = sum(needs.host.values()) + (CPU_PROCESS_BYTES if machine.unified else PROCESS_BYTES)
    device = sum(needs.device.values())
    host += device if machine.unified else 0
    said = f"the teacher takes {gib(host)} of host memory before training, and is gone then"
    if host > machine.host_memory_bytes:
        raise DoesNotFit(f"{said}; {gib(machine.host_memory_bytes)} are allowed")
    if not machine.unified and device > machine.device_memory_bytes:
        raise DoesNotFit(
            f"the teacher takes {gib(device)} of device memory at least, and "
            f"{gib(machine.device_memory_bytes)} are allowed"
        )
    return said


def _teacher(run: "Config") -> NamedModel:
    from megatrain.config import ModelSection

    section = ModelSection(path=run.loss.teacher, trust_remote_code=run.model.trust_remote_code)
    return model_of_run("the teacher", section)
