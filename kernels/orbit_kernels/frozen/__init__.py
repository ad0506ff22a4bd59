"""This package multiplies with weights that stay as they are stored."""
