"""Make a recorded run again: the same parameters, to the last bit, from its trace."""
