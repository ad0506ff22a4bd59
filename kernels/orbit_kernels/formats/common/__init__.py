"""This package holds what the weight formats have in common."""
