"""The tiles of a model, and the number of its parameters that compute with each token."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod

import torch

from megatrain.model.owned_experts import owned_names
from megatrain.model.sizes import share_of_a_token
from megatrain.model.spec import ModelSpec
from megatrain.optim import Rule, StreamedOptimizer
from megatrain.placement import Placement, Precision
from megatrain.tile import Entry, TileKind, TileLayout
from megatrain.tile.formats import FP32

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}


@dataclass(eq=False)
class Model:
    """A model's structure, its optimizer (of `rule`; None: the model is only run), and its tiles.

    On each of `hosts`, `ranks` share the tiles. Layers are computed in `precision`. Of the stacks
    of experts in `owned`, each rank has its own experts.
    """

    spec: ModelSpec
    rule: Rule | None
    ranks: int = 1
    hosts: int = 1
    precision: Precision = "bf16"
    owned: Collection[str] = ()

    def __post_init__(self) -> None:
        rule = self.rule
        self.optimizer = None if rule is None else StreamedOptimizer(rule, self.spec.capture.model)

    def placed(self, placement: Placement) -> "Model":
        """This model, with a placement's tiles. Raises InputError: ranks cannot own experts."""
        return self._owning if placement.own_experts and self.ranks > 1 else self

    @cached_property
    def _owning(self) -> "Model":
        owning = replace(self, owned=owned_names(self.spec, self.ranks))
        owning.optimizer = self.optimizer  # `replace` has made another one
        return owning

    @cached_property
    def layouts(self) -> list[TileLayout]:
        """The tiles in the order in which a forward needs them, and last that of unused parameters.

        Ranks' shards cut no row of an embedding table; a head that shares a table begins with it.
        All parameters are computed in one dtype, but for those that transformers keeps in fp32.
        """
        spec, ranks = self.spec, self.ranks
        groups = {} if self.optimizer is None else self.optimizer.group_of()
        shapes = {name: p.shape for name, p in spec.capture.model.named_parameters()}
        unmoved, in_fp32 = {*spec.unused, *spec.fixed}, spec.in_fp32(DTYPES[self.precision])
        operands: Collection[str] = ()
        if self.precision == "fp8":
            from megatrain.model.float8 import frozen_operands

            operands = frozen_operands(spec)

        def entry_at_0(name: str) -> Entry:
            shape, group = tuple(shapes[name]), None if name in unmoved else groups.get(name)
            if group is not None:
                return Entry(name, shape, 0, group, copied=name in in_fp32)
            packed = FP32 if name in in_fp32 else spec.packed.get(name)
            is_wide = name in spec.wide and packed is None
            return Entry(name, shape, 0, None, is_wide, packed, name in operands)

        def layout(kind: TileKind, names: list[str], visit: str = "") -> TileLayout:
            rows = lcm(*(prod(shapes[n][1:]) for n in names if n in spec.gathered))
            owned, entries = set(self.owned).intersection(names), map(entry_at_0, names)
            name = kind.value + visit  # `TileLayout` gives the entries their offsets
            return TileLayout(name, entries, kind, ranks=ranks, row=rows, owned=owned)

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

    @cached_property
    def computing(self) -> tuple[int, int]:
        """The number of parameters that compute with each token, and of trained ones among them."""
        config = self.spec.capture.model.config
        used = (layout for layout in self.layouts if layout.kind.in_every_step)
        entries = [entry for layout in used for entry in layout.entries]
        sizes = [entry.numel * share_of_a_token(config, entry.shape) for entry in entries]
        trained = (n for n, entry in zip(sizes, entries, strict=True) if entry.group is not None)
        return int(sum(sizes)), int(sum(trained))
