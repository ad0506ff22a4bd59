"""This package is the model with its slots, in the scheduler process."""
