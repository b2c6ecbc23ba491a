"""Train a problem from a configuration, and replay such a run in one process."""
