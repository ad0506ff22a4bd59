"""This SGLang plugin gives a server two adapter slots; a version staged in the inactive one is activated at a batch boundary.

- ``plugin`` is the entry point; ``upstream`` holds how SGLang is changed, with the proof that it is.
- ``startup`` holds options, flags, and what is checked before anything is allocated.
- ``control`` holds what the HTTP process and the scheduler process say to each other.
- ``http`` is the HTTP process: it has the routes, a request's choice of version, and the versions in every answer.
- ``scheduler`` is the scheduler process: it knows which version a slot holds, stages versions and activates them.
- ``model`` is the model in it: it has two slots beside the frozen linears, and the slot and version of every token.
- ``base`` is the frozen base as it was loaded.
- ``cpu`` holds what only replaces SGLang on a CPU.
"""
