"""This module makes ``trainer.strategy=orbit`` choose Orbit's configuration groups, however a run says it.

verl chooses its groups by ``model_engine``, and Orbit's are the choice ``orbit``. The strategy implies that choice,
which is added where Hydra has all the overrides: on the command line, in its compose API, and in the configuration
itself.
"""

from collections.abc import Callable
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from orbit_verl.config.keys import check_key

STRATEGY_KEY = "trainer.strategy"
STRATEGY = "orbit"
GROUP = "model_engine"
CONFIG_DIR = "pkg://orbit_verl.conf"


class OrbitSearchPath(SearchPathPlugin):
    """An `OrbitSearchPath` adds Orbit's choices of verl's configuration groups, behind verl's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds the folder of Orbit's choices; Hydra calls it before it composes a configuration."""
        search_path.append(provider="orbit", path=CONFIG_DIR)


def load_configuration(wrapped: Callable, instance: Any, args: tuple, kwargs: dict[str, Any]) -> DictConfig:
    """Wraps ``ConfigLoaderImpl.load_configuration``; composes with Orbit's groups where the run asks for the strategy.

    Raises:
        ValueError: another ``model_engine`` is chosen too, or an unknown key of ``orbit`` is set.
    """
    return _load(wrapped, *args, **kwargs)


def _load(wrapped: Callable, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any) -> DictConfig:
    def load(overrides: list[str]) -> DictConfig:
        return wrapped(config_name, overrides, *args, **kwargs)

    if not overrides_ask(overrides):
        try:
            config = load(overrides)
        except ConfigCompositionException:
            # A file may ask for the strategy, and overrides set keys of the groups that it has not got yet.
            if not _lacks_groups(load(_without_keys(overrides))):
                raise
        else:
            if not _lacks_groups(config):
                return config
    return load(with_groups(overrides))


def overrides_ask(overrides: list[str]) -> bool:
    """Says whether one of Hydra's overrides sets the strategy in any of its forms, or chooses its groups."""
    return any(_asks(override) for override in _parse(overrides))


def with_groups(overrides: list[str]) -> list[str]:
    """Returns the overrides with the choice of Orbit's groups, which set the strategy, in place of the strategy itself.

    Raises:
        ValueError: another ``model_engine`` is chosen too, or an unknown key of ``orbit`` is set.
    """
    kept = [override for override in _parse(overrides) if not _asks(override)]
    for override in kept:
        # Hydra would name an unknown key too, but neither the rule nor the keys that exist.
        if override.key_or_group.startswith("orbit."):
            check_key(override.key_or_group)
    if other := [override.value() for override in kept if override.key_or_group == GROUP]:
        raise ValueError(
            f"{GROUP}={other[0]}: {STRATEGY_KEY}={STRATEGY} brings its own configuration groups; leave {GROUP} out"
        )
    return [*(override.input_line for override in kept), f"{GROUP}={STRATEGY}"]


def check_composed(config: DictConfig) -> None:
    """Refuses a run that asks for the strategy and was composed without its groups, or the other way round.

    Raises:
        ValueError: names the two, and how to choose them.
    """
    strategy = OmegaConf.select(config, STRATEGY_KEY)
    engine = OmegaConf.select(config, "actor_rollout_ref.actor.strategy")
    if (strategy == STRATEGY) != (engine == STRATEGY):
        raise ValueError(
            f"{STRATEGY_KEY}={strategy}, actor_rollout_ref.actor.strategy={engine}: both must be {STRATEGY!r}, or neither; "
            f"choose the groups with {GROUP}={STRATEGY} and leave both keys out, and import verl before Hydra composes"
        )


def _parse(overrides: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(overrides)


def _without_keys(overrides: list[str]) -> list[str]:
    """Returns Hydra's own overrides, and those of the strategy and its groups."""
    return [
        override.input_line
        for override in _parse(overrides)
        if override.is_hydra_override() or override.key_or_group in (STRATEGY_KEY, GROUP)
    ]


def _asks(override: Override) -> bool:
    """Says whether an override sets the strategy, or chooses its groups."""
    if override.key_or_group not in (STRATEGY_KEY, GROUP) or override.is_delete() or override.is_sweep_override():
        return False
    return override.value() == STRATEGY


def _lacks_groups(config: DictConfig) -> bool:
    """Says whether a composed configuration asks for the strategy, and Orbit's groups are not in it."""
    return OmegaConf.select(config, STRATEGY_KEY) == STRATEGY and OmegaConf.select(config, GROUP) != STRATEGY
