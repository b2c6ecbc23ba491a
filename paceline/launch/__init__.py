"""Starting workers on this host, and finding out from the environment which worker one is.

``supervisor`` runs a script on local workers; ``worker`` is what it starts; ``reports`` is the line between
them; ``environment`` is the only module of the library (beside the command) that reads environment variables, and
``process_environment`` makes those of the processes that are started.
"""
