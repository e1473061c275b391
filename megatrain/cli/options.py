"""Options shared by commands; nothing heavy is imported before a command runs."""

from typing import Annotated, Literal

import typer

from megatrain.placement import Precision

DeviceName = Annotated[str, typer.Option(help="Compute on this device: auto, cpu, cuda or cuda:N.")]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Take at most so much memory of the GPU, as 10GiB.")
]
HostMemory = Annotated[
    str | None, typer.Option(help="Take at most so much memory of the host, as 64GiB.")
]
ComputeDtype = Annotated[
    Precision | None, typer.Option(help="Compute in this dtype; the default is bf16.")
]
States = Annotated[
    Literal["fp32", "bf16", "int8"] | None,
    typer.Option(help="Keep AdamW's moments in this type; the default is fp32."),
]
Master = Annotated[
    int | None,
    typer.Option(min=1, help="Keep so many bits of AdamW's master: 32, exact fp32, or 24."),
]
LoraRank = Annotated[
    int,
    typer.Option(min=0, help="Train LoRA of this rank on all linear layers; 0 trains everything."),
]
FrozenBase = Annotated[
    Literal["bf16", "fp8", "nf4"], typer.Option(help="Keep frozen linear layers in this type.")
]
