"""The trainer's worker: the engine, its adapter, optimiser and checkpoints."""
