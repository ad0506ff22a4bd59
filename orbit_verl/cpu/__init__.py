"""This package only replaces verl and Megatron-Core on a CPU; nothing here runs on a GPU."""
