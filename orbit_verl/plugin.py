"""This module is the entry point of the verl plugin.

verl imports this module at the end of ``import verl`` and never calls anything in it
(``verl/__init__.py::"_ep.load()"``); it also hides an exception raised here at DEBUG level. So registration happens at
import, every process proves that it did (``upstream.imports.require_applied``), and a run without it stops at once:
Hydra knows no ``trainer.strategy``.
"""

import logging
import os
from types import ModuleType

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from orbit_verl import changes
from orbit_verl.config import group
from orbit_verl.config.composing import OrbitSearchPath
from orbit_verl.cpu import platform  # noqa: F401  registers the CPU platform
from orbit_verl.upstream.imports import LEDGER

logging.getLogger("orbit_verl").setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))  # as verl's own modules do


def register_configurations(module: ModuleType) -> None:
    """Lets ``AutoConfig`` read Kimi's configurations, once verl's tokeniser is imported.

    transformers must not be importing itself meanwhile.
    """
    from orbit_kernels.families.kimi_k2 import register as register_kimi

    register_kimi()


def register() -> None:
    """Registers the plugin; it is idempotent.

    It is the target of the entry point, and called at import, because verl never calls it.
    """
    if OrbitSearchPath in Plugins.instance().discover(SearchPathPlugin):
        return
    Plugins.instance().register(OrbitSearchPath)
    group.store()
    LEDGER.register(changes.sections())


register()
