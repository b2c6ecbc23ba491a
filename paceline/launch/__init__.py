"""Starts workers on this host, and reads from the environment which worker a process is.

``supervisor`` runs a script on local workers. ``worker`` is the program that it starts. ``reports`` is the pipe from
worker to supervisor. Only ``environment`` and the command read environment variables; ``process_environment`` makes
those of the started processes.
"""
