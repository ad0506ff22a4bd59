"""Orthogonal fine-tuning: the method and its numerics in plain torch."""
