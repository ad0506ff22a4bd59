"""This module has the ledger of the changes to SGLang, and the kinds of change that SGLang alone has.

SGLang 0.5.12 only logs a hook whose target has moved, and serves on
(``plugins/hook_registry.py::HookRegistry.apply_hooks``). So every target and its parameters are checked here, and a
server with slots does not start when one is wrong.
"""

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator
from typing import ClassVar

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import is_cpu

from orbit_kernels.upstream.ledger import Change, Device, Ledger, Method, function_of, name_of


def is_needed(device: Device) -> bool:
    """Returns whether SGLang computes on such a device in this process."""
    return device is Device.ALL or (device is Device.CPU) == is_cpu()


LEDGER = Ledger(
    "SGLang",
    is_needed,
    consequence="it would serve without adapters",
    fix="Install the pinned SGLang (make setup), or serve without --enable-orbit-slots",
)


def require_applied() -> None:
    """Checks every change to SGLang that this device needs.

    Raises:
        NotInPlaceError: at least one is not in place; all are listed.
    """
    LEDGER.require_applied()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook(Change):
    """A ``Hook`` puts a function on a dotted target of SGLang, whose first parameters must be ``parameters``."""

    type: HookType
    function: Callable
    parameters: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Returns SGLang's word for it."""
        return self.type.value

    @property
    def by(self) -> str:
        """Returns the dotted name of the hook's function."""
        return name_of(self.function)

    def install(self) -> None:
        """Hands it to SGLang's registry, which applies it when the plugins are loaded."""
        HookRegistry.register(self.target, self.function, self.type)

    def problem(self) -> str | None:
        """Says why the hook is not in place, and is None when it is."""
        if problem := Method(self.target, self.parameters).problem():
            return problem
        if not _is_wrapped_by(pkgutil.resolve_name(self.target), self.function):
            return "the hook is not applied"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribute(Change):
    """An ``Attribute`` replaces a module's attribute that is no function, so that no hook can reach it."""

    kind: ClassVar[str] = "replaces"

    expected: object
    value: object

    @property
    def by(self) -> str:
        """Returns the dotted name of the new value's class."""
        return name_of(type(self.value))

    def install(self) -> None:
        """Replaces it, if it is what was expected."""
        module, _, name = self.target.rpartition(".")
        if pkgutil.resolve_name(self.target) is self.expected:
            setattr(pkgutil.resolve_name(module), name, self.value)

    def problem(self) -> str | None:
        """Says what is found instead of the new value, and is None when that is in place."""
        found = pkgutil.resolve_name(self.target)
        return None if found is self.value else f"it is {found!r}, expected {self.expected!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields(Change):
    """``Fields`` are added to those that a dataclass of SGLang has."""

    kind: ClassVar[str] = "adds fields to"

    add: Callable[[], None]
    names: tuple[str, ...]

    @property
    def by(self) -> str:
        """Returns the dotted name of the function that adds them."""
        return name_of(self.add)

    def install(self) -> None:
        """Adds them."""
        self.add()

    def problem(self) -> str | None:
        """Says which fields are missing, and is None when none is."""
        known = pkgutil.resolve_name(self.target).__dataclass_fields__
        missing = [name for name in self.names if name not in known]
        return f"it has no field {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def method_replaced(method: Method, instance: object, replacement: Callable) -> Iterator[None]:
    """Replaces a method on one instance while the body runs; replacements may be nested.

    Raises:
        NotInPlaceError: the instance has no such method.
    """
    name = method.target.rpartition(".")[2]
    before = vars(instance).get(name)
    method.replace_on(instance, replacement)
    try:
        yield
    finally:
        delattr(instance, name) if before is None else setattr(instance, name, before)


def _is_wrapped_by(attribute: object, function: Callable) -> bool:
    """Returns whether a wrapper of SGLang's registry around the attribute calls ``function``."""
    layer = function_of(attribute)
    while layer is not None:
        closure = getattr(layer, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in closure):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False
