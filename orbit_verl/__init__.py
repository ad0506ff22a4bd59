"""The verl plugin is a trainer of an adapter over a base that stays frozen as stored; servers get versions of the adapter.

- ``plugin``, ``config`` and ``conf`` hold the entry point, the ``orbit.*`` keys and Hydra's groups of them.
- ``driver`` holds the parts of verl's driver: the configuration of a run, the trainer's steps, the comparison of log-probs
  and bases.
- ``rollout`` holds verl's rollout actors: agent loops, the server as a Ray actor.
- ``publishing`` brings a new version to the servers.
- ``worker`` is the trainer's worker: engine, adapter, optimiser, checkpoints.
- ``model`` builds its model on Megatron-Core, from a Hugging Face checkpoint.
- ``cpu`` holds what only replaces verl and Megatron-Core on a CPU.
"""
