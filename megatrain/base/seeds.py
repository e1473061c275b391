"""Seeds of random numbers that are the same in every interpreter and version."""

import hashlib
from functools import lru_cache

LARGEST = (1 << 63) - 1  # the largest seed that every generator of torch takes


@lru_cache(maxsize=1 << 14)  # a step asks for each of its seeds twice
def derived_seed(*path: int) -> int:
    """A seed of 63 bits derived from `path`, such as a run's seed and the number of a step.

    It is the first 8 bytes (little-endian, 63 bits) of the SHA-256 of the numbers joined by "/".
    """
    digest = hashlib.sha256("/".join(map(str, path)).encode()).digest()
    return int.from_bytes(digest[:8], "little") & LARGEST
