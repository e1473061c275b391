"""Options that several commands have; nothing heavy is imported before they run."""

from typing import Annotated, Literal

import typer

from megatrain.placement import Precision

DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DeviceMemory = Annotated[str | None, typer.Option(help="Of the GPU at most: 10GiB.")]
HostMemory = Annotated[str | None, typer.Option(help="Of the process on the host at most: 64GiB.")]
ComputeDtype = Annotated[Precision | None, typer.Option(help="Compute dtype; bf16.")]
States = Annotated[
    Literal["fp32", "bf16", "int8"] | None, typer.Option(help="AdamW's moments; fp32.")
]
OptimizerName = Annotated[
    Literal["adamw", "lion", "sgd", "muon", "adafactor"],
    typer.Option(help="Its further settings are the defaults."),
]
Master = Annotated[
    int | None, typer.Option(min=1, help="Bits of AdamW's master: 32, exact fp32, or 24.")
]
LoraRank = Annotated[
    int, typer.Option(min=0, help="Train LoRA of this rank on all linear layers; 0: train all.")
]
FrozenBase = Annotated[
    Literal["bf16", "fp8", "nf4"], typer.Option(help="How frozen linear layers are kept.")
]
