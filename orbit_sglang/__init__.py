"""SGLang plugin: adapter slots in a running server, switched at a batch boundary.

- ``plugin``, ``hooks``, ``launch``: the entry point, the table of hooks with the proof that each is applied, start-up.
- ``config``, ``flags``: the options, how they reach ``ServerArgs``, and what cannot be served with slots.
- ``versions``: which version each slot holds and which one is active; pure Python.
- ``slots``, ``forward``: rotations beside the frozen linears, and the slot and version of every token.
- ``messages``, ``scheduler``, ``staging``: control inside the scheduler process.
- ``frontend``, ``routes``, ``request_body``, ``reporting``: HTTP and the versions in every answer.
- ``metrics``: Prometheus. ``seeds``: sampling that can be repeated.
- ``cpu``: what a machine without a CUDA driver needs.
"""
