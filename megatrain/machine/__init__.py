"""What predictions are made of: the rates of a machine, measured here or taken from a list."""

from megatrain.machine.present import present_cpu, present_machine
from megatrain.machine.published import CONTEXT_BYTES, machine_for
from megatrain.machine.rates import (
    DISK_READ_GBPS,
    DISK_WRITE_GBPS,
    NETWORK_GBPS,
    Machine,
    mapping_bytes,
)
