"""Compute times drawn from distributions: for the virtual cluster, and injected into real workers."""
