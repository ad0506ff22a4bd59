"""A new version on its way to the servers."""
