"""How a plugin changes its upstream: one entry for each change, and the proof that it is in place."""
