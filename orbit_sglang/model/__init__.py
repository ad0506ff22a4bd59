"""The model with its slots, in the scheduler process."""
