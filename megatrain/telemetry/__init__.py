"""A run and its machine seen from outside: metrics, progress, memory, environment."""
