"""This package knows the linears of a decoder: their names, which are fused, and what a rank holds of one."""
