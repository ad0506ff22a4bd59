"""The two slots' numbers, and that of the base. Importable without torch or SGLang."""

BASE_SLOT = 0
SLOTS = (1, 2)
