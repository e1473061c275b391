"""What a step will cost: the engine's own step on a device that keeps time (`simulate.py`)."""
