"""The cgroups that limit this process, versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cgroup_files(name: str) -> Iterator[str]:
    """What files of this name say (`memory.max`), of the process's cgroup and of all around it.

    A container sees its own as the root; a batch job or a service is in one further down.
    """
    return _texts(_ROOT, name, "")


def old_cgroup_files(controller: str, name: str) -> Iterator[str]:
    """`cgroup_files` of version 1, where each controller has a folder (`memory`)."""
    return _texts(_ROOT / controller, name, controller)


def _texts(base: Path, name: str, controller: str) -> Iterator[str]:
    for folder in _folders(base, controller):
        try:
            yield (folder / name).read_text().strip()
        except OSError:
            continue


def _folders(base: Path, controller: str) -> Iterator[Path]:
    yield base
    for line in _own_lines():
        _, controllers, path = line.split(":", 2)
        inside = PurePosixPath(path).parts[1:]
        if controller in controllers.split(",") and ".." not in inside:
            yield from (base.joinpath(*inside[:n]) for n in range(1, len(inside) + 1))


def _own_lines() -> list[str]:
    try:
        return _OWN.read_text().splitlines()
    except OSError:  # no Linux
        return []
