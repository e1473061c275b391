"""The options of `megatrain doctor` and `plan`; nothing heavy is imported before they run."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import (
    ComputeDtype,
    DeviceMemory,
    DeviceName,
    FrozenBase,
    HostMemory,
    LoraRank,
    Master,
    States,
)
from megatrain.telemetry.log import passing

Picture = Annotated[
    Path | None, typer.Option(help="Draw where the bytes rest into this .png, .svg or .pdf file.")
]
TotalTokens = Annotated[
    float | None,
    typer.Option(min=1, max=1e18, help="Count with so many tokens of the whole run, as 1e9."),
]
DiskTbw = Annotated[
    float | None,
    typer.Option(
        min=1, max=1e9, help="Count with so many terabytes that the drive may be written, as 600."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a key of the run file. It may be given several times.",
    ),
]
Network = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1e5,
        help="Count with so many GB/s between hosts, each way; the default is 12.5 (100 Gbit/s).",
    ),
]


def doctor(
    device: DeviceName = "auto",
    folder: Annotated[
        Path, typer.Option(help="Measure the disk of this folder, where runs are written.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure this machine and say what is wrong or slow.

    What was measured is kept for `plan` and for `placement: auto`. Warnings leave the exit code 0.
    """
    from megatrain.cli.doctor import run_doctor

    run_doctor(device, folder, as_json)


def plan(
    run: Annotated[
        Path | None, typer.Argument(help="A run file (YAML). Give it, or --model.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Plan for this model: a shape (7B), a folder, a config.json or a hub id."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for this GPU, as 4090 or H200; the default is the one here."),
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Count with so many cores of the CPU.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Take so many tokens a step; the default is 98304.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Take so many tokens a row; the default is 1024.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Take so many rows at once; otherwise chosen.")
    ] = None,
    total_tokens: TotalTokens = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Plan for so many GPUs on each host; the default is 1."),
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=1024, help="Plan for so many hosts, with --gpus each.")
    ] = 1,
    network: Network = None,
    clip: Annotated[
        bool | None,
        typer.Option(
            "--clip/--no-clip", help="Clip by the exact norm of all gradients; on by default."
        ),
    ] = None,
    precision: ComputeDtype = None,
    states: States = None,
    master: Master = None,
    lora_r: LoraRank = 0,
    base: FrozenBase = "bf16",
    disk_space: Annotated[
        str | None, typer.Option(help="Let planes take so much of a disk, as 200GiB.")
    ] = None,
    disk_tbw: DiskTbw = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    picture: Picture = None,
) -> None:
    """Say whether a run fits, what it will take and how long, before anything is allocated.

    Nothing but a model's config.json is downloaded. Exit code 3: it does not fit.
    """
    passing("loading torch and transformers...")
    gc.disable()  # it takes a fifth of the time to import torch and transformers, and frees nothing
    from megatrain.cli.plan import Asked, Where, run_plan

    gc.freeze()  # nor are they looked through when the interpreter ends, for half a second
    options = {
        "tokens_per_step": tokens, "sequence_length": sequence_length, "micro_batch": micro_batch,
        "clip": clip, "precision": precision, "states": states, "master": master,
        "device_memory": device_memory, "host_memory": host_memory, "disk_space": disk_space,
    }  # fmt: skip
    run_plan(
        run,
        overrides or [],
        Asked(model, lora_r, base),
        options,
        Where(gpu, cores),
        total_tokens=None if total_tokens is None else int(total_tokens),
        gpus=gpus,
        hosts=hosts,
        network_gbps=network,
        disk_terabytes=disk_tbw,
        as_json=as_json,
        picture=picture,
    )
