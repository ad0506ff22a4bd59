"""Numerics and wire contract that the trainer and the server share.

Nothing here imports verl or SGLang: both plugins import this package, never each other.

- ``adapter``: what an adapter is (method, targets), to and from peft's configuration.
- ``methods``: the adapter methods, siblings that differ in how they change a linear.
- ``oft``, ``lora``: the methods' numerics in plain torch, the specification of every later kernel.
- ``wire``: the payload that carries an adapter version to a server, and its errors.
"""
