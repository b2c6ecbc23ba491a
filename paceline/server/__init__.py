"""The live parameter server: a policy driven by real workers on sockets and shared memory."""
