"""One training step over streamed tiles (`step.py` is the file to read first)."""
