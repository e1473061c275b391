"""Opens models from all their sources; writes what is saved beside tiles. No step is taken here."""
