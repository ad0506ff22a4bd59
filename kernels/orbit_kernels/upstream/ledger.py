"""This module has the ledger of a plugin: every change that it makes to its upstream.

The ledger says why a change is made, until when, and whether it is in place. It imports neither verl nor SGLang. Each
plugin has one ``Ledger`` in its ``upstream`` folder, and fills it in its ``changes`` module.
"""

import dataclasses
import enum
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class Device(enum.StrEnum):
    """A ``Device`` says where a change is needed."""

    ALL = "every device"
    CPU = "a CPU only"
    CUDA = "CUDA only"


class State(enum.StrEnum):
    """A ``State`` says what is known of a change in this process."""

    APPLIED = "applied"
    LATER = "made as it runs"
    ELSEWHERE = "not on this device"
    BROKEN = "not in place"


class NotInPlaceError(RuntimeError):
    """Changes that a process needs are not in place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A ``Change`` is one change to upstream.

    What the function that makes it puts on the objects that it is given is part of it.

    Args:
        target: dotted name of what is changed.
        why: what would go wrong without it.
        until: when it can go.
        device: where it is needed.

    Attributes:
        kind: what is done to the target, in a word or two.
        by: dotted name of the function, class or file that does it.
    """

    target: str
    why: str
    until: str
    device: Device = Device.ALL

    kind: ClassVar[str]
    later: ClassVar[bool] = False
    """This says whether the change is made on instances while a process runs, and proven there.

    Its target is checked before all the same.
    """

    if TYPE_CHECKING:
        # A field of some changes, a property of others.
        by: str

    def problem(self) -> str | None:
        """Returns why it is not in place, or cannot be made, in this process; None when all is well.

        It imports the target.
        """
        raise NotImplementedError

    def install(self) -> None:
        """Makes the change, where that is not done by importing or calling what makes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """A ``Status`` is a change and its state in this process."""

    section: str
    change: Change
    state: State
    problem: str | None


class Ledger:
    """A ``Ledger`` has the changes of one plugin, by the process that needs them.

    Args:
        upstream: name and version of what is changed.
        is_needed: whether this process computes on such a device.
        consequence: what a process would do without its changes.
        fix: what to do about a change that is not in place.
    """

    def __init__(self, upstream: str, is_needed: Callable[[Device], bool], consequence: str, fix: str):
        self.upstream = upstream
        self._is_needed = is_needed
        self._consequence, self._fix = consequence, fix
        self._sections: dict[str, list[Change]] = {}

    def register(self, sections: Mapping[str, Iterable[Change]]) -> None:
        """Remembers every change, and installs those that this device needs.

        Raises:
            ValueError: a change has been registered before.
        """
        for section, changes in sections.items():
            for change in changes:
                if any((known.target, known.by) == (change.target, change.by) for known in self.changes()):
                    raise ValueError(f"{change.by} is already registered on {change.target}; register it once")
                if self._is_needed(change.device):
                    change.install()
                self._sections.setdefault(section, []).append(change)

    def changes(self) -> list[Change]:
        """Returns every change, in order."""
        return [change for changes in self._sections.values() for change in changes]

    def report(self, *sections: str) -> list[Status]:
        """Returns the changes of some sections, of all by default, and their state in this process."""
        return [
            self._status(section, change)
            for section, changes in self._sections.items()
            if not sections or section in sections
            for change in changes
        ]

    def require_applied(self, *sections: str) -> None:
        """Checks the changes of some sections, of all by default.

        Raises:
            NotInPlaceError: at least one is not in place; all are listed.
        """
        report = self.report(*sections)
        problems = [f"{status.change.target}: {status.problem}" for status in report if status.problem]
        if not report:
            problems = ["the plugin is not loaded in this process"]
        if problems:
            raise NotInPlaceError(
                f"Orbit's changes do not fit this {self.upstream}, so {self._consequence}: {'; '.join(problems)}. {self._fix}"
            )

    def _status(self, section: str, change: Change) -> Status:
        if not self._is_needed(change.device):
            return Status(section=section, change=change, state=State.ELSEWHERE, problem=None)
        problem = change.problem()
        state = State.BROKEN if problem else State.LATER if change.later else State.APPLIED
        return Status(section=section, change=change, state=state, problem=problem)


@dataclasses.dataclass(frozen=True)
class Method:
    """A ``Method`` is a function or method of upstream, and the names of its first parameters."""

    target: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """Returns why the target is not what is expected; it imports the target."""
        try:
            current = pkgutil.resolve_name(self.target)
        except (AttributeError, ImportError) as error:
            return f"the target does not exist: {error}"
        return signature_problem(function_of(current), self.parameters)

    def replace_on(self, instance: object, replacement: Callable) -> Any:
        """Replaces the method of one instance, and returns the one that it had.

        Raises:
            NotInPlaceError: the instance has no such method, or its first parameters are others.
        """
        name = self.target.rpartition(".")[2]
        current = getattr(instance, name, None)
        of_instance = f"{type(instance).__module__}.{type(instance).__qualname__}.{name}"
        problem = "does not exist" if current is None else signature_problem(current, self.parameters[1:])
        if problem:
            raise NotInPlaceError(f"{of_instance}: {problem}. Install the pinned stack (make setup)")
        setattr(instance, name, replacement)
        return current


def signature_problem(function: Callable, parameters: tuple[str, ...]) -> str | None:
    """Returns why a function's first parameters are not those expected; None when they are."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(parameters)] != parameters:
        return f"the target takes {found}, expected {parameters}"
    return None


def function_of(attribute: Any) -> Callable:
    """Returns the function behind a method."""
    return getattr(attribute, "__func__", attribute)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnInstance(Change):
    """An ``OnInstance`` change replaces a method on single instances, by ``Method.replace_on``."""

    kind: ClassVar[str] = "wraps, on instances"
    later: ClassVar[bool] = True

    method: Method
    by: str
    target: str = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "target", self.method.target)

    def problem(self) -> str | None:
        """Does what Change says."""
        return self.method.problem()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replaced(Change):
    """A ``Replaced`` attribute is replaced while a process runs, by the object that ``by`` names.

    What replaces it proves it.
    """

    kind: ClassVar[str] = "replaces"
    later: ClassVar[bool] = True

    by: str

    def problem(self) -> str | None:
        """Does what Change says."""
        return resolve_problem(self.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registered(Change):
    """A ``Registered`` change is an entry in a registry of upstream.

    Args:
        by: the function or class that registers it, whose module is imported.
        read: what the registry holds; whose it is says its module, or its own text.
        owners: beginnings of the modules that it may come from.
    """

    kind: ClassVar[str] = "registers"

    by: str
    read: Callable[[Any], Any]
    owners: tuple[str, ...] = ("orbit_",)

    def problem(self) -> str | None:
        """Does what Change says."""
        try:
            pkgutil.resolve_name(self.by)
            held = self.read(pkgutil.resolve_name(self.target))
        except (AttributeError, ImportError, LookupError, StopIteration) as error:
            return f"the registry has no such entry: {type(error).__name__}: {error}"
        origin = held if isinstance(held, str) else getattr(held, "__module__", type(held).__module__)
        return None if origin.startswith(self.owners) else f"it holds {held!r}, expected what {self.by} registers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Added(Change):
    """An ``Added`` change adds something to an object of upstream while a process runs, beside what it has."""

    kind: ClassVar[str] = "adds to"
    later: ClassVar[bool] = True

    by: str

    def problem(self) -> str | None:
        """Does what Change says."""
        return resolve_problem(self.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overridden(Change):
    """A subclass has ``Overridden`` methods and attributes of a class of upstream in their place.

    One that upstream has no longer would never be called.
    """

    kind: ClassVar[str] = "overrides"

    by: str
    names: tuple[str, ...]

    def problem(self) -> str | None:
        """Does what Change says."""
        try:
            upstream, ours = pkgutil.resolve_name(self.target), pkgutil.resolve_name(self.by)
        except (AttributeError, ImportError) as error:
            return f"the target does not exist: {error}"
        if isinstance(ours, type) and not issubclass(ours, upstream):
            return f"{self.by} is no subclass of it"
        lost = [name for name in self.names if not (hasattr(upstream, name) or _is_read_by(upstream, name))]
        return f"it has no {', '.join(lost)} to override" if lost else None


def _is_read_by(upstream: type, name: str) -> bool:
    """Returns whether a class, or one that it inherits from, has an attribute of that name on its instances."""
    sources = (inspect.getsource(base) for base in upstream.__mro__ if base.__module__ != "builtins")
    return any(re.search(rf"\bself\.{name}\b", source) for source in sources)


def resolve_problem(target: str) -> str | None:
    """Returns why a dotted name cannot be resolved; None when it can be."""
    try:
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as error:
        return f"the target does not exist: {error}"
    return None


def counts(report: Iterable[Status]) -> dict[str, int]:
    """Returns how many changes there are, by where they are needed, in the order of ``Device``."""
    devices = [status.change.device for status in report]
    return {device.value: devices.count(device) for device in Device if device in devices}


def name_of(function: Callable) -> str:
    """Returns the dotted name of a function or class."""
    return f"{function.__module__}.{function.__qualname__}"
