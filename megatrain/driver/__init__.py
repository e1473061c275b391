"""The drivers of GPUs: one file for each vendor behind one protocol."""

from megatrain.driver.base import Driver


def find_driver() -> Driver:
    """The driver of the GPUs that torch is built for."""
    import torch

    if torch.version.hip:
        from megatrain.driver import amd

        return amd.Amd()
    from megatrain.driver import nvidia

    return nvidia.Nvidia()
