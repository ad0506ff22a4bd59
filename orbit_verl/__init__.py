"""verl plugin: a trainer whose base is frozen as it is stored, and whose adapter reaches running servers as versions.

- ``plugin``, ``config``, ``conf``: the entry point; the ``orbit.*`` keys and Hydra's groups of them.
- ``driver``: verl's driver: the configuration of a run, the trainer's steps, the comparison of log-probs and bases.
- ``rollout``: verl's rollout actors: agent loops, the server as a Ray actor.
- ``publishing``: a new version on its way to the servers.
- ``worker``: the trainer's worker: engine, adapter, optimiser, checkpoints.
- ``model``: its model on Megatron-Core, from a Hugging Face checkpoint.
- ``cpu``: what only replaces verl and Megatron-Core on a CPU.
"""
