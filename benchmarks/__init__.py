"""Measurements that stay: each writes a result that says how to repeat it."""
