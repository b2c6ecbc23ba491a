"""Lock-free training of sparse problems."""
