"""The hooks on SGLang, and the proof that each is in place.

SGLang 0.5.12 only logs a hook whose target has moved, and serves on (``plugins/hook_registry.py``, ``apply_hooks``).
So every target and its parameters are checked here, and a server with slots does not start when one is wrong.
"""

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class HookError(RuntimeError):
    """Hooks that are not in place."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function on a dotted target of SGLang, whose first parameters must be ``parameters``."""

    target: str
    kind: HookType
    function: Callable
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """Why the hook does not work in this process; None when it is applied."""
        try:
            current = pkgutil.resolve_name(self.target)
        except (AttributeError, ImportError) as error:
            return f"the target does not exist: {error}"
        found = tuple(inspect.signature(inspect.unwrap(_function(current))).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"the target takes {found}, expected {self.parameters}"
        if not _is_wrapped_by(current, self.function):
            return "the hook is not applied"
        return None


@dataclasses.dataclass(frozen=True)
class HookStatus:
    """One line of ``hook_report``; ``problem`` is None when the hook is applied."""

    target: str
    kind: str
    problem: str | None


_HOOKS: list[Hook] = []


def register(hooks: list[Hook]) -> None:
    """Hand hooks to SGLang's registry, and remember them for the report.

    Raises:
        ValueError: the same function is already registered on that target.
    """
    for hook in hooks:
        if any(known.target == hook.target and known.function is hook.function for known in _HOOKS):
            raise ValueError(f"{hook.function.__name__} is already registered on {hook.target}; register it once")
        HookRegistry.register(hook.target, hook.function, hook.kind)
        _HOOKS.append(hook)


def hook_report() -> list[HookStatus]:
    """Every hook and its state in this process; imports the targets."""
    return [HookStatus(hook.target, hook.kind.value, hook.problem()) for hook in _HOOKS]


def require_applied() -> None:
    """Check every hook.

    Raises:
        HookError: at least one is not applied; all are listed.
    """
    problems = [f"{status.target}: {status.problem}" for status in hook_report() if status.problem]
    if not _HOOKS:
        problems = ["no hook is registered; call orbit_sglang.plugin.register() first"]
    if problems:
        raise HookError(
            "Orbit's hooks do not fit this SGLang, so it would serve without adapters: "
            + "; ".join(problems)
            + ". Install the pinned SGLang (make setup), or serve without --enable-orbit-slots"
        )


def _function(attribute: object) -> Callable:
    return getattr(attribute, "__func__", attribute)


def _is_wrapped_by(attribute: object, function: Callable) -> bool:
    """Whether a wrapper of SGLang's registry around the attribute calls ``function``."""
    layer = _function(attribute)
    while layer is not None:
        closure = getattr(layer, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in closure):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False
