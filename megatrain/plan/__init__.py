"""Before a run: what this machine can do and what slows it, and what a run will take."""
