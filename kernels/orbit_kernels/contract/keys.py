"""Keys that requests and answers carry, and the modes that they name. Importable without torch."""

from typing import Literal, get_args

REQUESTED_VERSION_KEY = "orbit_version"
"""A request's own choice of version: at the top of its body, and then in ``sampling_params.custom_params``."""

VERSIONS_KEY = "orbit_versions"
"""What an answer says of its tokens, ``[version, first token, count]`` for each run of one version: in ``meta_info``, and
one list for each choice in ``metadata`` of the OpenAI routes."""

ERROR_KEY = "orbit_error"
"""Body of a refusal in the ``finish_reason`` of a request that ended before its first token."""

InflightMode = Literal["finish", "switch"]
"""Whether a running request ends on its version, or goes on with the new one from its next token."""
INFLIGHT_MODES: tuple[InflightMode, ...] = get_args(InflightMode)
DEFAULT_INFLIGHT: InflightMode = "finish"
