"""Measurements whose results stand in ``docs/``; each prints the table that it is the source of."""
