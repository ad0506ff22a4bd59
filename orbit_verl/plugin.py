"""Entry point of the verl plugin.

verl imports this module at the end of ``import verl`` and never calls anything in it (verl 0.9.1, __init__.py:77-83);
it also hides an exception raised here at DEBUG level. So registration happens at import, ``hook_report`` proves that it
did, and a run without it stops at once: Hydra knows no ``trainer.strategy``.
"""

import dataclasses
import logging
import os
import sys

import wrapt
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from orbit_verl.config.keys import check_key
from orbit_verl.cpu import platform  # noqa: F401  registers the CPU platform

logger = logging.getLogger(__name__)
logging.getLogger("orbit_verl").setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))  # as verl's own modules do

STRATEGY_OVERRIDE = "trainer.strategy=orbit"
CONFIG_DIR = "pkg://orbit_verl.conf"


class OrbitSearchPath(SearchPathPlugin):
    """Puts Orbit's configuration groups in front of verl's, only for runs that ask for the strategy."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes a configuration."""
        if STRATEGY_OVERRIDE not in sys.argv:
            return
        search_path.prepend(provider="orbit", path=CONFIG_DIR)
        # Hydra would name an unknown key too, but neither the rule nor the keys that exist.
        for argument in sys.argv[1:]:
            key = argument.lstrip("+~").partition("=")[0]
            if key.startswith("orbit."):
                check_key(key)


def _hook_validate_config(module) -> None:
    """Resolve and check a run's configuration before verl checks it, which is before Ray starts."""

    def validate_config(wrapped, instance, args, kwargs):
        from orbit_verl.driver.run_config import is_orbit, resolve

        config = kwargs["config"] if "config" in kwargs else args[0]
        if is_orbit(config):
            resolve(config)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "validate_config", validate_config)


def _hook_trainers(module) -> None:
    """Let verl's trainer modes build Orbit's trainers for runs with the strategy."""
    from orbit_verl.driver.trainer import install

    install(module.trainer_base.TRAINER_REGISTRY)


def _hook_auto_config(module) -> None:
    """Let every process of a run read Kimi's configurations; transformers must not be importing itself meanwhile."""
    from orbit_kernels.families.kimi_k2 import register

    register()


@dataclasses.dataclass
class Hook:
    """One place where the plugin enters verl or transformers; ``problem`` is None when it is in place."""

    target: str
    problem: str | None = "its module is not imported yet"

    def apply(self, module, install) -> None:
        """Run once the module is imported; verl would hide the error, so it is kept and raised."""
        try:
            install(module)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            logger.error("orbit: hook on %s failed: %s", self.target, self.problem)
            raise
        self.problem = None


_HOOKS = {
    "verl.utils.tokenizer": (Hook("transformers.AutoConfig"), _hook_auto_config),
    "verl.utils.config": (Hook("verl.utils.config.validate_config"), _hook_validate_config),
    "verl.trainer.ppo.v1": (Hook("verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY"), _hook_trainers),
}


def hook_report() -> list[Hook]:
    """Import every hooked module and say which hooks are in place."""
    import importlib

    for name, (hook, _) in _HOOKS.items():
        try:
            importlib.import_module(name)
        except Exception as error:
            hook.problem = f"{type(error).__name__}: {error}"
    return [hook for hook, _ in _HOOKS.values()]


def register() -> None:
    """Target of the entry point. Idempotent; called at import, because verl never calls it."""
    if OrbitSearchPath in Plugins.instance().discover(SearchPathPlugin):
        return
    Plugins.instance().register(OrbitSearchPath)
    for name, (hook, install) in _HOOKS.items():
        wrapt.register_post_import_hook(lambda module, hook=hook, install=install: hook.apply(module, install), name)


register()
