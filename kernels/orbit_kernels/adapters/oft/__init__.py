"""This package holds orthogonal fine-tuning: the method and its numerics in plain torch."""
