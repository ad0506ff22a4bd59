"""verl's driver: the run's configuration, the trainer's steps, the difference of log-probs."""
