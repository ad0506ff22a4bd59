"""This package says how a change to SGLang is made, and proves that it is in place."""
