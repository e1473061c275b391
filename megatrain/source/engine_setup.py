"""Everything that an engine needs except its placement."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from pathlib import Path

import torch

from megatrain.base.units import size
from megatrain.compat.transformers import encoders
from megatrain.device import Recording
from megatrain.device.plane_file import PlaneFile, disk_bytes
from megatrain.errors import DoesNotFit, InputError
from megatrain.model.adapters import adapted
from megatrain.model.build import share_of_a_token
from megatrain.model.rebuilt import difference
from megatrain.model.spec import ModelSpec
from megatrain.model.trained import Trained
from megatrain.optim import Rule, StreamedOptimizer
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import Precision, Verify
from megatrain.source.source import Source, structure
from megatrain.tile import TileKind, TileLayout

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}


def tile_layouts(spec: ModelSpec, groups: dict[str, int], ranks: int = 1) -> list[TileLayout]:
    """Tiles in the order in which a forward needs them; the head, then what nothing reads, last.

    `groups` gives each trainable parameter's optimizer group; all others are frozen. Between
    `ranks` no row of a table that is gathered is cut, and a head begins with one that it shares.
    """
    shapes = {name: p.shape for name, p in spec.capture.model.named_parameters()}
    unmoved = {*spec.unused, *spec.fixed}

    def layout(kind: TileKind, names: list[str], visit: str = "") -> TileLayout:
        parameters = [(n, shapes[n], None if n in unmoved else groups.get(n)) for n in names]
        rows = lcm(*(prod(shapes[n][1:]) for n in names if n in spec.gathered))
        name, wide, packed = kind.value + visit, spec.wide, spec.packed
        return TileLayout(name, parameters, kind, wide, packed, ranks=ranks, row=rows)

    tiles = [
        layout(TileKind.EMBEDDING, [n for n in spec.gathered if n not in spec.epilogue]),
        layout(TileKind.PROLOGUE, spec.prologue),
    ]
    for visit, layer in enumerate(spec.layers):
        names = [f"{layer.name}.{n}" for n, _ in layer.module.named_parameters()]
        tiles.append(layout(TileKind.LAYER, names, f" {visit}"))
    head = spec.epilogue
    if ranks > 1:
        head = sorted(head, key=lambda name: name not in spec.gathered)
    tiles.append(layout(TileKind.HEAD, head))
    if spec.media:
        tiles.append(layout(TileKind.MEDIA, spec.media))
    return [*tiles, layout(TileKind.UNUSED, spec.unused)]


@dataclass(frozen=True)
class Model:
    """A model's structure, what of it is trained, and its tiles.

    Attributes:
        optimizer: None: it is only run.
        ranks: how many share its tiles.
        hosts: how many times so many, each of which has all tiles.
    """

    spec: ModelSpec
    optimizer: StreamedOptimizer | None
    ranks: int = 1
    hosts: int = 1

    @classmethod
    def trained(cls, spec: ModelSpec, rule: Rule | None, ranks: int = 1, hosts: int = 1) -> "Model":
        """A model that so many ranks train with an optimizer of this rule; None: run."""
        optimizer = None if rule is None else StreamedOptimizer(rule, spec.capture.model)
        return cls(spec, optimizer, ranks, hosts)

    @property
    def rule(self) -> Rule | None:
        """The optimizer's; None: the model is only run."""
        return None if self.optimizer is None else self.optimizer.rule

    @cached_property
    def layouts(self) -> list[TileLayout]:
        """The model's tiles, in the order in which a forward needs them."""
        groups = {} if self.optimizer is None else self.optimizer.group_of()
        return tile_layouts(self.spec, groups, self.ranks)

    @cached_property
    def computing(self) -> tuple[int, int]:
        """Parameters that compute with a token, and those of them that are trained."""
        config = self.spec.capture.model.config
        used = (layout for layout in self.layouts if layout.kind is not TileKind.UNUSED)
        entries = [entry for layout in used for entry in layout.entries]
        sizes = [entry.numel * share_of_a_token(config, entry.shape) for entry in entries]
        trained = (n for n, entry in zip(sizes, entries, strict=True) if entry.group is not None)
        return int(sum(sizes)), int(sum(trained))


@dataclass(frozen=True)
class EngineSetup:
    """Everything that an engine needs except its placement.

    Attributes:
        device: on which its limits are set.
        host_limit: bytes that the process may have; None: what the machine allows.
        disk_space: bytes that planes may take on the disk; None: what is free.
        disk: folder on the disk that planes may rest on; None: none may.
        seed: of weights that are drawn, and of dropout.
        ranks: who share the model.
        sequence_ranks: who share every row as well; alone where each rank has rows of its own.
        verify: when planes are compared with their checksums.
    """

    source: Source
    model: Model
    max_grad_norm: float | None
    precision: Precision
    device: Recording
    host_limit: int | None
    disk_space: int | None
    disk: str | Path | None
    seed: int
    ranks: Ranks = ALONE
    sequence_ranks: Ranks = ALONE
    verify: Verify = "save"

    @property
    def disk_bytes(self) -> int:
        """Disk space for planes of this rank; 0 without a disk. Raises InputError: no such disk."""
        if self.disk is None:
            return 0
        return disk_bytes(self.disk, self.disk_space) // self.ranks.on_host

    def open_file(self, num_bytes: int) -> PlaneFile:
        """A file for planes of this rank on the disk. All ranks call this.

        Raises:
            InputError: of any rank: there is no such disk, or no file can be made there.
            DoesNotFit: of any rank: there is not so much space.
        """
        files: list[PlaneFile] = []

        def create() -> None:
            if self.disk is None:
                raise InputError(
                    f"the placement keeps {size(num_bytes)} on a disk (disk_moments, "
                    "disk_remainder, disk_weights), but none is given; set disk to a folder on it"
                )
            every = num_bytes * self.ranks.on_host
            if self.disk_space is not None and every > self.disk_space:
                raise DoesNotFit(
                    f"the placement keeps {size(every)} on the disk, and disk_space is "
                    f"{size(self.disk_space)}; raise it"
                )
            files.append(PlaneFile.create(self.disk, num_bytes))

        try:
            self.ranks.agree(create)
        except BaseException:
            for file in files:
                file.close()
            raise
        return files[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers are computed in."""
        return DTYPES[self.precision]


def open_structure(
    source: Source, optimizer: Rule | None, ranks: Ranks, *, saveable: bool
) -> Model:
    """The model's structure and tiles; notes what a checkpoint would not have of it.

    Raises InputError: the model cannot be streamed, or not be saved.
    """
    if source.saved is None and not source.structures:  # that puts other forwards into the model
        computed = torch.float32 if source.copied is None else source.dtype
        with_code = source.folder is not None
        source.lost = difference(source.model, source.dtype, computed, with_code=with_code)
    spec = structure(source, trained=optimizer is not None)
    if optimizer is not None and saveable and source.lost is not None:
        raise InputError(f"{source.lost}; or give saveable=False, to train what is never saved")
    return Model.trained(spec, optimizer, ranks.shards.size, ranks.hosts)


def choose_trained(
    source: Source, trained: Trained, optimizer: Rule | None, precision: Precision
) -> None:
    """Set which parameters require gradients. Raises InputError: they cannot be trained so."""
    plain = adapted(source.model) is None
    if plain and trained.train_only is None and source.stored is not None and not source.resumes:
        for encoder in encoders(source.model):
            encoder.requires_grad_(False)
    trained.choose(source.model)
    if source.base != "bf16" and precision != "bf16":
        raise InputError(f"base is {source.base!r}, and precision {precision!r}; take bf16")
    if plain:
        return
    if precision == "fp8":
        raise InputError("precision is 'fp8', and the model has an adapter; take bf16")
    if optimizer is not None and not any(p.requires_grad for p in source.model.parameters()):
        raise InputError(
            "every parameter of the PeftModel is frozen: load the adapter with is_trainable=True"
        )
