"""This package is the start-up: it has options, flags, and checks of the checkpoint before anything is allocated."""
