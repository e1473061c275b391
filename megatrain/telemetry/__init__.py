"""What a run and its machine look like from outside: metrics, progress, memory, environment."""
