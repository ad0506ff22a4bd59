"""The frozen base model is a Hugging Face checkpoint as a Megatron-Core GPTModel, on CPU and GPU alike.

Nothing is imported here: `tensors` also serves checks that run before Megatron-Core is loaded.
"""
