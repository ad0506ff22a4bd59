"""What a Hugging Face configuration says about a decoder, family by family."""
