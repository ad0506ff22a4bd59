"""The two slots, and what one holds. Importable without torch or SGLang."""

import dataclasses
from collections.abc import Mapping

BASE_SLOT = 0
SLOTS = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedAdapter:
    """What a slot holds, as reported; ``modules`` counts adapted linears by leaf name."""

    version: int
    adapter_type: str
    digest: str
    num_bytes: int
    modules: Mapping[str, int]
