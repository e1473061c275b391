"""What is measured, and who takes part with which settings."""

from dataclasses import asdict, dataclass
from typing import Any

from megatrain.base.units import GIB

ADAMW: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0

MEASURED = "measured"
FAILED = "failed"
NO_DEVICE_MEMORY = "out of device memory"
NO_HOST_MEMORY = "out of host memory"
NO_TIME = "out of time"
NO_PACKAGE = "package missing"


@dataclass(frozen=True)
class Case:
    """The work of one table.

    Attributes:
        device_memory_bytes: what may be used of the device, CUDA's context included; None: all.
        lora_r: LoRA of this rank on all linear layers is trained, and nothing else; 0: all is.
    """

    shape: str
    layers: int | None
    sequences: int
    sequence_length: int
    steps: int
    device: str
    device_memory_bytes: int | None
    seed: int = 0
    lora_r: int = 0

    @property
    def name(self) -> str:
        """`3b-96x1024-12gib`: the part of a file name that says what was done."""
        layers = f"-{self.layers}layers" if self.layers else ""
        memory = self.device_memory_bytes
        budget = f"-{memory / GIB:g}gib" if memory else ""
        lora = f"-lora{self.lora_r}" if self.lora_r else ""
        return f"{self.shape}{layers}-{self.sequences}x{self.sequence_length}{lora}{budget}"

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.sequence_length


@dataclass(frozen=True)
class Rival:
    """One who takes part.

    Attributes:
        name: in file names and on the command line.
        title: in tables; `{version}` stands for that of its package.
        module: of benchmarks.rivals; has `build(task) -> Runner`.
        options: for the module, when it serves two rows.
        package: what must be installed beside torch and transformers.
        warmup: steps before the measured ones, enough for its own adaptation.
        micro_batches: rows of a micro-batch for each shape; halved while the device's memory is
            too small, and never more than a step has.
        chooses: it chooses micro-batches by itself; there are none here.
        adapters: it takes part where an adapter is trained, and only there.
    """

    name: str
    title: str
    module: str
    options: dict[str, Any]
    package: str | None
    warmup: int
    micro_batches: dict[str, int]
    chooses: bool = False
    adapters: bool = False

    def takes_part(self, case: Case) -> bool:
        return self.name == "megatrain" or self.adapters == bool(case.lora_r)

    def micro_batch(self, case: Case) -> int | None:
        if self.chooses:
            return None
        return min(case.sequences, self.micro_batches.get(case.shape, 8))


@dataclass(frozen=True)
class Task:
    """What a process is told to do."""

    case: Case
    rival: str
    options: dict[str, Any]
    warmup: int
    micro_batch: int | None  # None: the rival chooses
    seconds: float

    @property
    def rows(self) -> int:
        """Of a micro-batch, for a rival that does not choose."""
        assert self.micro_batch is not None
        return self.micro_batch

    @property
    def num_micro_batches(self) -> int:
        return -(-self.case.sequences // self.rows)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Task":
        return cls(**{**values, "case": Case(**values["case"])})


_OFFLOADING = {"1.5b": 32, "3b": 32, "7b": 16, "14b": 16, "32b": 8, "72b": 4}


def _peft(
    name: str, words: str, rows_7b: int, *, compiled: bool, checkpointing: bool = True
) -> Rival:
    return Rival(
        name,
        "PEFT {version} on the GPU" + words,
        "adapters",
        {"compiled": compiled, "checkpointing": checkpointing},
        "peft",
        warmup=3,
        micro_batches={"3b": 2 * rows_7b, "7b": rows_7b},
        adapters=True,
    )


RIVALS = (
    Rival(
        "megatrain",
        "MegaTrain",
        "own",
        {},
        None,
        warmup=4,
        micro_batches={},
        chooses=True,
    ),
    Rival(
        "resident",
        "Hugging Face on the GPU, forward and backward only, no optimizer",
        "resident",
        {},
        None,
        warmup=2,
        micro_batches={"1.5b": 32, "3b": 32, "7b": 16, "14b": 8},
    ),
    Rival(
        "resident-trained",
        "Hugging Face on the GPU, compiled, nothing recomputed, fused AdamW",
        "resident",
        {"trains": True},
        None,
        warmup=3,
        micro_batches={"0.5b": 32, "1.5b": 16, "3b": 16, "7b": 2},
    ),
    Rival(
        "deepspeed",
        "DeepSpeed {version}, ZeRO-3 offload",
        "zero3",
        {},
        "deepspeed",
        warmup=2,
        micro_batches=_OFFLOADING,
    ),
    Rival(
        "fsdp2",
        "FSDP2, CPU offload",
        "fsdp2",
        {},
        None,
        warmup=1,
        micro_batches=_OFFLOADING,
    ),
    Rival(
        "trainstream-offloaded",
        "TrainStream {version}, weights offloaded",
        "streams",
        {"offload": True},
        "trainstream",
        warmup=2,
        micro_batches=_OFFLOADING,
    ),
    Rival(
        "trainstream-auto",
        "TrainStream {version}, as it chooses",
        "streams",
        {"offload": "auto"},
        "trainstream",
        warmup=5,
        micro_batches=_OFFLOADING,
    ),
    _peft("peft-compiled", ", compiled", 8, compiled=True, checkpointing=False),
    _peft("peft-compiled-recomputed", ", compiled, layers recomputed", 16, compiled=True),
    _peft("peft-recomputed", ", layers recomputed", 16, compiled=False),
)


def rival(name: str) -> Rival:
    """The one of that name."""
    return next(each for each in RIVALS if each.name == name)
