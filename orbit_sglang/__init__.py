"""SGLang plugin: adapter slots in a running server, switched at a batch boundary.

- ``plugin``, ``upstream``: the entry point; how SGLang is changed, with the proof that it is.
- ``startup``: options, flags, and what is checked before anything is allocated.
- ``control``: what the HTTP process and the scheduler process say to each other.
- ``http``: the HTTP process: routes, a request's choice of version, the versions in every answer.
- ``scheduler``: the scheduler process: which version a slot holds, staging, activation.
- ``model``: the model in it: two slots beside the frozen linears, and the slot and version of every token.
- ``base``: the frozen base as it was loaded.
- ``cpu``: what only replaces SGLang on a CPU.
"""
