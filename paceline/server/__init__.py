"""The live parameter server: its messages and channels, the server's loop and the worker's side of it."""
