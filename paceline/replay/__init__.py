"""Replay a recorded run from its trace: the same parameters, bit for bit."""
