"""This package makes the changes to verl, each once its module is imported, and holds the ledger that proves all of them."""
