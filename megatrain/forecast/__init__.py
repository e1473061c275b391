"""Forecasts of a step's cost: the engine's step on a device that keeps time (`simulate.py`)."""
