"""This package brings a new version to the servers."""
