"""This package reads and checks a checkpoint folder, and says what a base is, to the bit."""
