"""This module makes the Hydra group ``orbit`` from the dataclasses of its keys."""

import dataclasses
from typing import Any

from hydra.core.config_store import ConfigStore

from orbit_verl.config.keys import Keys, OrbitConfig


def store() -> None:
    """Lets Hydra find the group ``orbit`` with the option ``default``, which has every key at its default."""
    ConfigStore.instance().store(group="orbit", name="default", node=_node(OrbitConfig()), provider="orbit")


def _node(keys: Keys) -> dict[str, Any]:
    """Returns a group of keys as verl builds its dataclass again: values, and the class under ``_target_``."""
    values = {field.name: getattr(keys, field.name) for field in dataclasses.fields(keys)}
    return {
        "_target_": f"{type(keys).__module__}.{type(keys).__qualname__}",
        **{name: _node(value) if isinstance(value, Keys) else value for name, value in values.items()},
    }
