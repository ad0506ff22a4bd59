"""Numerics and contract that the trainer and the server share.

Nothing here imports verl or SGLang: both plugins import this package, never each other.

- ``contract``: what the two say to each other: versions, payload, routes, answers, errors, options.
- ``linears``: names of linears, which are one matrix in a server, what a rank holds of one.
- ``families``: what a checkpoint's configuration says about a decoder, a module a family.
- ``formats``: how a weight is stored (BF16, FP8, INT4, NVFP4, MXFP4) and what a checkpoint's configuration says of it.
- ``checkpoint``: a checkpoint folder read and checked; formats and digests of a base, to compare two.
- ``frozen``, ``experts``: the product with a stored weight, and with the stored experts of a layer, chunk by chunk.
- ``adapters``: what an adapter is, to and from peft's configuration; a package a method, with its numerics in plain torch.
"""
