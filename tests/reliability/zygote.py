"""Starts real `megatrain` processes in a tenth of a second: forks of one that has imported all.

Requests and answers are JSON lines on stdin and stdout: `{"start": [arguments], "log": path}` is
answered with the process id, `{"wait": id}` with its exit code (negative: the signal).
"""

import gc
import importlib
import json
import os
import sys

from tests.cli.cases import leave_out

IMPORTED = (
    "megatrain.cli.app",
    "megatrain.cli.train",
    "megatrain.train.loop",
    "transformers.models.llama.modeling_llama",
    "filelock",
)


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    warm_up()
    gc.freeze()  # else each child looks for garbage in all that is imported: 40 % of its time
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = os.fork() or become(request)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        print(json.dumps(answer), file=answers, flush=True)


def warm_up() -> None:
    """What each run would do anew: compile patterns; and what no run here needs."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    os.fsync = lambda file: None  # what is written is in the page cache, which no kill empties
    leave_out(setattr)


def become(request: dict) -> None:
    """The child: a `megatrain` command with an output file of its own."""
    from megatrain.cli import main

    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    os.environ.update(request["environment"])
    sys.argv = ["megatrain", *request["start"]]
    hooks = request.get("before")
    if hooks:
        exec(hooks, {})
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120  # as Python itself ends then
        os._exit(code)


if __name__ == "__main__":
    serve()
