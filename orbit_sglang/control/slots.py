"""This module numbers the two slots and that of the base; it is importable without torch or SGLang."""

BASE_SLOT = 0
SLOTS = (1, 2)
