"""Numerics and wire contract that the trainer and the server share.

Nothing here imports verl or SGLang: both plugins import this package, never each other.

- ``adapter``: what an adapter is (type, block size, targets), to and from peft's configuration.
- ``oft``: orthogonal fine-tuning in plain torch, the specification of every later kernel.
- ``wire``: the payload that carries an adapter version to a server, and its errors.
"""
