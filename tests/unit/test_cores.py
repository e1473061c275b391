"""A process that is allowed some of the machine's cores does not plan with the others."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")

ASK = "from megatrain.telemetry.host import usable_cores; print(usable_cores())"


def test_a_core_that_is_not_allowed_is_not_counted():
    one = min(os.sched_getaffinity(0))
    command = f"import os; os.sched_setaffinity(0, {{{one}}}); {ASK}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout.split() == ["1"], done.stderr
