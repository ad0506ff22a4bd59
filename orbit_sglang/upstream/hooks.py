"""The hooks on SGLang, and the proof that each is in place.

SGLang 0.5.12 only logs a hook whose target has moved, and serves on (``plugins/hook_registry.py``, ``apply_hooks``).
So every target and its parameters are checked here, and a server with slots does not start when one is wrong.
"""

import contextlib
import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import ClassVar

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import is_cpu


class HookError(RuntimeError):
    """Hooks that are not in place."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function on a dotted target of SGLang, whose first parameters must be ``parameters``.

    One that is ``cpu_only`` is left out where SGLang computes on another device.
    """

    target: str
    kind: HookType
    function: Callable
    parameters: tuple[str, ...]
    cpu_only: bool = False

    @property
    def needed(self) -> bool:
        """Whether this process needs the hook."""
        return not self.cpu_only or is_cpu()

    def install(self) -> None:
        """Hand it to SGLang's registry, which applies it when the plugins are loaded."""
        HookRegistry.register(self.target, self.function, self.kind)

    def problem(self) -> str | None:
        """Why the hook does not work in this process; None when it is applied or not needed."""
        if not self.needed:
            return None
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
class CpuAttribute:
    """A module's attribute that is no function, so that no hook can reach it; replaced where SGLang computes on a CPU."""

    target: str
    expected: object
    value: object

    kind: ClassVar[HookType] = HookType.REPLACE
    function: ClassVar[None] = None

    @property
    def needed(self) -> bool:
        """Whether this process needs the replacement."""
        return is_cpu()

    def install(self) -> None:
        """Replace it, if it is what was expected."""
        module, _, name = self.target.rpartition(".")
        if pkgutil.resolve_name(self.target) is self.expected:
            setattr(pkgutil.resolve_name(module), name, self.value)

    def problem(self) -> str | None:
        """Why it is not replaced; None when it is, or need not be."""
        if not self.needed or pkgutil.resolve_name(self.target) is self.value:
            return None
        return f"it is {pkgutil.resolve_name(self.target)!r}, expected {self.expected!r}"


@dataclasses.dataclass(frozen=True)
class HookStatus:
    """One line of ``hook_report``; ``problem`` is None when the hook is applied, or not needed on this device."""

    target: str
    kind: str
    needed: bool
    problem: str | None


_HOOKS: list[Hook | CpuAttribute] = []


def register(hooks: list[Hook | CpuAttribute]) -> None:
    """Install what this device needs, and remember everything for the report.

    Raises:
        ValueError: the same function is already registered on that target.
    """
    for hook in hooks:
        if any(known.target == hook.target and known.function is hook.function for known in _HOOKS):
            raise ValueError(f"{hook.function} is already registered on {hook.target}; register it once")
        if hook.needed:
            hook.install()
        _HOOKS.append(hook)


def hook_report() -> list[HookStatus]:
    """Every hook and its state in this process; imports the targets."""
    return [HookStatus(hook.target, hook.kind.value, hook.needed, hook.problem()) for hook in _HOOKS]


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


@contextlib.contextmanager
def method_replaced(instance: object, name: str, replacement: Callable) -> Iterator[None]:
    """Replace a method on one instance while the body runs; replacements may be nested."""
    before = vars(instance).get(name)
    setattr(instance, name, replacement)
    try:
        yield
    finally:
        delattr(instance, name) if before is None else setattr(instance, name, before)


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
