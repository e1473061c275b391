"""The drivers of GPUs: one file for each vendor behind one protocol."""
