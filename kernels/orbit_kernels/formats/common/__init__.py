"""What the weight formats have in common."""
