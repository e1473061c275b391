"""Shows what a change alters of what it should leave alone.

python -m tests.golden                             what differs from tests/golden/golden.json
python -m tests.golden --update                    writes that file
python -m tests.golden --trace "tied, 2 ranks" 17  the operations and waits of one placement
python -m tests.golden --against COMMIT            also weights: both commits on this machine
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.golden import digests

ROOT = Path(__file__).parents[2]
NATIVE = "megatrain/kernels/_native.so"


def everything() -> dict[str, Any]:
    return digests.snapshots() | {"traces": digests.traces()}


def of_commit(commit: str) -> dict[str, Any]:
    """The digests that a commit prints of itself, with those of weights."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            shutil.copy(ROOT / NATIVE, tree / NATIVE)
            command = [sys.executable, "-m", "tests.golden", "--print"]
            environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            run = subprocess.run(
                command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
    return json.loads(run.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--trace", nargs=2, metavar=("GROUP", "NUMBER"))
    parser.add_argument("--against", metavar="COMMIT")
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
            before, now = of_commit(options.against), everything() | {"weights": digests.weights()}
        else:
            before, now = digests.stored(), everything()
        changed = digests.differences(before, now)
        print(*changed or ["nothing differs"], sep="\n")
        return bool(changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
