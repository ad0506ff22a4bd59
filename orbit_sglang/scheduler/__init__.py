"""The scheduler process: the version of every request, and the operations on the slots."""
