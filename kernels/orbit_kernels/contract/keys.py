"""Keys that requests and answers carry. Importable without torch."""

REQUESTED_VERSION_KEY = "orbit_version"
"""A request's own choice of version: at the top of its body, and then in ``sampling_params.custom_params``."""
