"""Helpers of every part: bytes and times, JSON and YAML, seeds, whole files, huge pages."""
