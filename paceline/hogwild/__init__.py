"""Sparse problems that threads of one process train on shared memory (Niu et al., NIPS 2011)."""
