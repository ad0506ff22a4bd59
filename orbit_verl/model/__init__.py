"""The frozen base model: a Hugging Face checkpoint as a Megatron-Core GPTModel, on CPU and GPU alike."""

from orbit_verl.model.architecture import DenseArchitecture
from orbit_verl.model.build import build_model
from orbit_verl.model.naming import base_digest, frozen_linears, named_tensors

__all__ = ["DenseArchitecture", "base_digest", "build_model", "frozen_linears", "named_tensors"]
