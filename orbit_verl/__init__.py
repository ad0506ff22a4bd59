"""Trainer side: the verl plugin."""
