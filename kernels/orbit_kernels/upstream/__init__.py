"""This package says how a plugin changes its upstream: each change has one entry, and the proof that it is in place."""
