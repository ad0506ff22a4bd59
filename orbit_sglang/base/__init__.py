"""This package finds the frozen base, as the server loaded it, again in SGLang's parameters, checks and digests it."""
