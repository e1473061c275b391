"""The placement that `placement="auto"` takes, and whether one fits (`auto.py`)."""
