"""This package holds what the adapter methods have in common."""
