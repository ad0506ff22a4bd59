"""This package holds the numerics and the contract that the trainer and the server share.

Nothing here imports verl or SGLang: both plugins import this package, never each other.

- ``contract`` says what the two tell each other: versions, payload, routes, answers, errors, options.
- ``linears`` names linears, and says which are one matrix in a server and what a rank holds of one.
- ``families`` says what a checkpoint's configuration means for a decoder; each family has a module.
- ``formats`` says how a weight is stored (BF16, FP8, INT4, NVFP4, MXFP4) and what a checkpoint's configuration says of
  it.
- ``checkpoint`` reads and checks a checkpoint folder, and takes formats and digests of a base, to compare two.
- ``frozen`` and ``experts`` multiply with a stored weight, and with the stored experts of a layer, chunk by chunk.
- ``adapters`` says what an adapter is, to and from peft's configuration; each method has a package, with its numerics
  in plain torch.
"""
