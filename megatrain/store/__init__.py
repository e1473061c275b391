"""The planes of all tiles: in host memory, on the device, on a disk."""
