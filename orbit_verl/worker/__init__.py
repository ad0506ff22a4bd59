"""This package is the trainer's worker: the engine, its adapter, optimiser and checkpoints."""
