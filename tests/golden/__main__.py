"""Shows what a change alters of what it should leave alone.

python -m tests.golden                             what differs from tests/golden/golden.json
python -m tests.golden --update                    writes that file
python -m tests.golden --trace "tied, 2 ranks" 17  the operations and waits of one placement
python -m tests.golden --print > FILE              all, and digests of weights
python -m tests.golden --against FILE              what differs from that, on the same machine
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.golden import digests


def everything() -> dict[str, Any]:
    return digests.snapshots() | {"traces": digests.traces()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--trace", nargs=2, metavar=("GROUP", "NUMBER"))
    parser.add_argument("--against", metavar="FILE", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trace:
        group, number = options.trace
        print(digests.traced_schedules()[int(number)], *digests.notes(group, int(number)), sep="\n")
    elif options.print:
        print(json.dumps(everything() | {"weights": digests.weights()}))
    elif options.update:
        digests.store(everything())
    else:
        if options.against:
            before = json.loads(options.against.read_text(encoding="utf-8"))
            now = everything() | {"weights": digests.weights()}
        else:
            before, now = digests.stored(), everything()
        changed = digests.differences(before, now)
        print(*changed or ["nothing differs"], sep="\n")
        return bool(changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
