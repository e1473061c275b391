"""The options of `megatrain doctor`; nothing heavy is imported before it runs."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    folder: Annotated[
        Path, typer.Option(help="Where runs are written; its disk is measured.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure this machine and say what is wrong or slow.

    What was measured is kept for `plan` and for `placement: auto`. Warnings leave the exit code 0.
    """
    from megatrain.cli.doctor import run_doctor

    run_doctor(device, folder, as_json)
