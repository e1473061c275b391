"""What benchmarks share: their options, each with its default, and the file of a result."""

import argparse
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HELP = {
    "device": "auto, cpu, cuda, cuda:N or mps",
    "layers": "only so many layers",
    "lengths": "tokens of the rows",
    "new": "tokens of a reply",
    "out": "write the result to this file",
    "output": "where results go",
    "prompt": "tokens of a prompt",
    "resident": "layers that rest on the device",
    "sequence_length": "tokens of a row",
    "sequences": "rows of one optimizer step",
    "shape": "size of Qwen2.5",
    "steps": "measured steps",
    "warm_to": "longer rows without warm-up",
    "warmup": "steps before the measured ones",
}


def parse(
    doc: str | None, arguments: Sequence[str] | None = None, **defaults: Any
) -> argparse.Namespace:
    """The options of a benchmark.

    Args:
        doc: what the benchmark does.
        arguments: None: those of the command line.
        defaults: of each option. A type stands for none, False for a flag, a list for choices, of
            which the first is the default.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name, default in defaults.items():
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if isinstance(default, type):
            how = {"type": default}
        elif default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how = {"default": default[0], "choices": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=_HELP.get(name), **how)
    return parser.parse_args(arguments)


def case_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options of a measurement, without where its result goes."""
    return {name: value for name, value in vars(chosen).items() if name != "out"}


def write(path: Path | None, result: Any) -> None:
    """Write a result as JSON; None: nowhere."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def peak_process_bytes() -> int:
    """The largest resident memory this process has had, in bytes, children not counted."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    # Where the kernel does not say it, this is at least the peak of the parent process.
    return 1024 * (peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def num_compilations() -> int:
    """Number of graphs that torch.compile has made in this process, recompiled ones included."""
    import torch._dynamo.utils  # takes a second

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
