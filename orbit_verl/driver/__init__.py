"""This package runs in verl's driver: the run's configuration, the trainer's steps, the difference of log-probs."""
