"""The parameters of a server in memory: layout, shared memory, double buffer, the pushes of a commit."""
