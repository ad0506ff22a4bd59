"""This module defines the keys that requests and answers carry, and the modes that they name.

It can be imported without torch.
"""

from typing import Literal, get_args

REQUESTED_VERSION_KEY = "orbit_version"
"""A request's own choice of version stands under this key, at the top of its body, and then in
``sampling_params.custom_params``.
"""

VERSIONS_KEY = "orbit_versions"
"""What an answer says of its tokens stands here: ``[version, first token, count]`` for each run of one version.

It is in ``meta_info``, and one list for each choice is in ``metadata`` of the OpenAI routes.
"""

ERROR_KEY = "orbit_error"
"""A request that ended before its first token has the body of its refusal under this key in its ``finish_reason``."""

InflightMode = Literal["finish", "switch"]
"""The mode says whether a running request ends on its version, or goes on with the new one from its next token."""
INFLIGHT_MODES: tuple[InflightMode, ...] = get_args(InflightMode)
DEFAULT_INFLIGHT: InflightMode = "finish"
