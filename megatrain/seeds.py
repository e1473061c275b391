"""Seeds of random numbers, by a defined function: the same in every interpreter, for ever."""

import hashlib

LARGEST = (1 << 63) - 1  # what every generator of torch takes


def derived_seed(*path: int) -> int:
    """A seed of 63 bits for what `path` names, such as a run's seed and the number of a step.

    The first eight bytes, little-endian, of the SHA-256 of the numbers in decimal, joined by "/".
    """
    digest = hashlib.sha256("/".join(map(str, path)).encode()).digest()
    return int.from_bytes(digest[:8], "little") & LARGEST
