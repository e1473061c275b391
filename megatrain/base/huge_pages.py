"""Memory in huge pages, where the system has them."""

import mmap


def mapping(num_bytes: int, flags: int = 0) -> mmap.mmap:
    """Zeros of this process alone, whose pages appear when they are touched.

    What Python maps unless told otherwise is shared, and gets small pages as Linux is usually set
    (`shmem_enabled`). A disk moved 1.7 times as many bytes a second into huge ones.

    Args:
        flags: further ones of the mapping.

    Raises:
        OSError: there is no room.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
