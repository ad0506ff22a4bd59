"""This package is the `orbit` command."""
