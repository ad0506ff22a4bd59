"""This module is the entry point of the SGLang plugin (group ``sglang.srt.plugins``)."""

from sglang.srt.plugins import load_plugins

from orbit_sglang import changes
from orbit_sglang.upstream import hooks

_registered = False


def register() -> None:
    """Makes the changes to SGLang; it is harmless when repeated.

    SGLang calls it in each of its processes. A caller that builds ``ServerArgs`` itself calls it first: it then loads
    SGLang's plugins, so that the hooks are applied when it returns.
    """
    global _registered
    if _registered:
        return
    _registered = True  # before load_plugins, which calls this function again
    hooks.LEDGER.register(changes.sections())
    load_plugins()
