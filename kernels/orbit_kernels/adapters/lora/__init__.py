"""This package holds low-rank adaptation: the method and its numerics in plain torch."""
