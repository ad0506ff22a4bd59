"""Low-rank adaptation: the method and its numerics in plain torch."""
