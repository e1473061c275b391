"""The folder of a run: its name, layout and lock, and how the run has ended."""
