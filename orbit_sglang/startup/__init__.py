"""Start-up: options, flags, and what is held against the checkpoint before anything is allocated."""
