"""The frozen base model: a Hugging Face checkpoint as a Megatron-Core GPTModel, on CPU and GPU alike.

Nothing is imported here: `architecture` and `tensors` also serve checks that run before Megatron-Core is loaded.
"""
