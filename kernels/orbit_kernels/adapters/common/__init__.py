"""What the adapter methods have in common."""
