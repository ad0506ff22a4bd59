"""A checkpoint folder read and checked, and what a base is, to the bit."""
