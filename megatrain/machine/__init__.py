"""What predictions are made of: the rates of a machine, measured here or taken from a list."""

from megatrain.machine.rates import (
    CONTEXT_BYTES,
    DISK_READ_GBPS,
    DISK_WRITE_GBPS,
    NETWORK_GBPS,
    Machine,
    machine_for,
    mapping_bytes,
    present_machine,
)
