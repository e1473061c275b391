"""What every part may use: bytes and times, JSON and YAML, seeds, whole files, huge pages."""
