"""This package is the scheduler process: it has the version of every request, and the operations on the slots."""
