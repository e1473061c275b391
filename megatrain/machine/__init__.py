"""What predictions are made of: the rates of a machine, measured here or taken from a list."""

from megatrain.machine.listed import machine_for
from megatrain.machine.present import present_cpu, present_machine
from megatrain.machine.rates import Machine

__all__ = ["Machine", "machine_for", "present_cpu", "present_machine"]
