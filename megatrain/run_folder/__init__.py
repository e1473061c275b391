"""The folder of a run: its layout, which one a run has, its lock, and how the run has ended."""
