"""This package holds what the HTTP process and the scheduler process say to each other."""
