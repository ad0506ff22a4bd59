"""This package declares the ``orbit.*`` keys of a run."""
