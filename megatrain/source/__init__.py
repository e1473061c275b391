"""Where a model comes from, and what of it is saved beside its tiles: no step is taken here."""
