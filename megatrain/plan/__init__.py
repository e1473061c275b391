"""Before a run: this machine's rates and faults, and a run's needs."""
