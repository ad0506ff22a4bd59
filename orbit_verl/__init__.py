"""The verl plugin trains an adapter over a base that is frozen as it is stored; running servers get it as versions.

- ``plugin``, ``config`` and ``conf`` hold the entry point, the ``orbit.*`` keys and Hydra's groups of them.
- ``driver`` runs in verl's driver: a run's configuration, the trainer's steps, the comparison of log-probs and bases.
- ``rollout`` holds verl's rollout actors: agent loops, the server as a Ray actor.
- ``publishing`` brings a new version to the servers.
- ``worker`` is the trainer's worker: engine, adapter, optimiser, checkpoints.
- ``model`` builds its model on Megatron-Core, from a Hugging Face checkpoint.
- ``cpu`` holds what only replaces verl and Megatron-Core on a CPU.
"""
