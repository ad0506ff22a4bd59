"""The ``orbit.*`` keys of a run."""
