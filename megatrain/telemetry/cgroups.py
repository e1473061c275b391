"""The cgroups that limit this process, versions 1 and 2."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cgroup_files(name: str, controller: str = "") -> Iterator[str]:
    """The contents of files of this name (`memory.max`) in the process's cgroup and its parents.

    A container sees its cgroup as the root; a batch job or a service is in a nested one.

    Args:
        controller: for version 1, where each controller (`memory`) has a folder.
    """
    folders, lines = [_ROOT / controller], []
    with suppress(OSError):  # no Linux
        lines = _OWN.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = PurePosixPath(path).parts[1:]
        if controller in controllers.split(",") and ".." not in inside:
            folders += (folders[0].joinpath(*inside[:n]) for n in range(1, len(inside) + 1))
    for folder in folders:
        with suppress(OSError):
            yield (folder / name).read_text().strip()
