"""A whole run: from the run file to the model folder."""
