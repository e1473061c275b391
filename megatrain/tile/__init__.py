"""Tiles: the parameters of one schedulable unit as one flat aligned range."""

from megatrain.tile.layout import Entry, Span, TileKind, TileLayout
