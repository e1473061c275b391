"""Hold all of a device's memory but so many bytes, until standard input ends.

What is left free is a budget that every rival sees in the same way: those that plan ask how much
is free, and those that do not plan run into the end of it.
"""

import sys

import torch

from megatrain.base.units import MIB


def main() -> None:
    """`python -m benchmarks.rivals.ballast BYTES DEVICE`."""
    left, name = int(sys.argv[1]), sys.argv[2]
    device = torch.device("cuda" if name == "auto" else name)
    torch.cuda.init()
    held = []
    while (spare := torch.cuda.mem_get_info(device)[0] - left) >= 2 * MIB:
        size = spare // (2 * MIB) * 2 * MIB
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
