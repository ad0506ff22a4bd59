"""Numerics and wire contract that the trainer and the server share.

Nothing here imports verl or SGLang: both plugins import this package, never each other.

- ``adapter``: what an adapter is (method, targets), to and from peft's configuration.
- ``methods``: the adapter methods, siblings that differ in how they change a linear.
- ``oft``, ``lora``: the methods' numerics in plain torch, the specification of every later kernel.
- ``fusing``: linears that are one matrix in a server.
- ``formats``: how a weight is stored (BF16, FP8, INT4, NVFP4, MXFP4) and what a checkpoint's configuration says of it.
- ``checkpoint``, ``manifest``: a checkpoint folder read and checked; formats and digests of a base, to compare two.
- ``frozen``, ``experts``: the product with a stored weight, and with the stored experts of a layer, chunk by chunk.
- ``wire``: the payload that carries an adapter version to a server, and its errors.
"""
