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
    Path | None, typer.Option(help="Draw where the bytes rest: a name in .png, .svg or .pdf.")
]
TotalTokens = Annotated[float | None, typer.Option(min=1, max=1e18, help="Of the whole run: 1e9.")]
DiskTbw = Annotated[
    float | None, typer.Option(min=1, max=1e9, help="Terabytes that a drive may be written: 600.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a key of the run file."),
]
Network = Annotated[
    float | None,
    typer.Option(min=0.01, max=1e5, help="GB/s of a host to others, each way; 12.5 (100 Gbit/s)."),
]


def doctor(
    device: DeviceName = "auto",
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


def plan(
    run: Annotated[Path | None, typer.Argument(help="A run file (YAML); or give --model.")] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A shape (7B), a folder, a config.json, or a hub id.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Such as 4090 or H200; this one's.")] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Of the CPU.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="A step; 98304.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens a row; 1024.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Rows at once; chosen.")] = None,
    total_tokens: TotalTokens = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=64, help="Of each host; 1.")] = None,
    hosts: Annotated[int, typer.Option(min=1, max=1024, help="With --gpus each.")] = 1,
    network: Network = None,
    clip: Annotated[bool | None, typer.Option("--clip/--no-clip", help="Exactly; on.")] = None,
    precision: ComputeDtype = None,
    states: States = None,
    master: Master = None,
    lora_r: LoraRank = 0,
    base: FrozenBase = "bf16",
    disk_space: Annotated[str | None, typer.Option(help="For planes on a disk: 200GiB.")] = None,
    disk_tbw: DiskTbw = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
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
