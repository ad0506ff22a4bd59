"""This package only replaces SGLang on a CPU; nothing here runs on a GPU."""
