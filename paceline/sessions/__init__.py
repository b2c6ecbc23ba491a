"""What ``join()`` gives: the sessions of peers and of workers, and the server's role."""
