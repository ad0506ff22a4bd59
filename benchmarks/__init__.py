"""This package has the measurements whose results stand in ``docs/``; each prints the table that it is source of."""
