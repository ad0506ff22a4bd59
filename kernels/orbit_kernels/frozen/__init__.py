"""The product with weights that stay as they are stored."""
