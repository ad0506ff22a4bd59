"""The frozen base as it is stored: its manifest on every device, and a plain-torch reference of its linears on a CPU.

SGLang's own classes read the quantisation configuration, create the parameters and load the files. On CUDA, SGLang's
kernels compute with them. On a CPU, ``linear`` takes the place of those kernels: it keeps the packed parameters and
dequantises them on use with the code that the trainer uses. One module per quantisation family of SGLang lists its
hooks.
"""
