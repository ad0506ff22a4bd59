"""A ledger proves the changes to verl, Hydra, transformers and Megatron-Core; here are those that wait for an import.

verl imports the plugin in every process, long before its own modules: a change is made when its module is imported.
"""

import dataclasses
import enum
import importlib
import importlib.resources
import importlib.util
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import ClassVar

import wrapt

from orbit_kernels.upstream.ledger import Change, Device, Ledger, Registered, signature_problem

logger = logging.getLogger(__name__)


class Process(enum.StrEnum):
    """A `Process` is one kind of process of a run; they stand in the order of one step."""

    EVERY = "every process"
    DRIVER = "driver"
    WORKER = "trainer's worker"
    ROLLOUT = "rollout actors"
    CPU_EVERY = "CPU: every process"
    CPU_WORKER = "CPU: trainer's worker"


def is_needed(device: Device) -> bool:
    """Says whether verl computes on such a device in this process."""
    if device is Device.ALL:
        return True
    from verl.plugin.platform import get_platform

    return (device is Device.CPU) == (get_platform().device_name == "cpu")


LEDGER = Ledger(
    "verl",
    is_needed,
    consequence="the run would not be what trainer.strategy=orbit asks for",
    fix="Install the pinned stack (make setup), and leave VERL_USE_EXTERNAL_PLUGINS unset",
)


def require_applied(process: Process) -> None:
    """Checks the changes that a process needs.

    Raises:
        NotInPlaceError: at least one is not in place; all are listed.
    """
    on_cpu = (Process.CPU_EVERY, Process.CPU_WORKER) if process is Process.WORKER else (Process.CPU_EVERY,)
    LEDGER.require_applied(Process.EVERY, process, *on_cpu)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Change):
    """A `Wrapped` is a function or method that, from its module's import on, is called through what ``by`` names.

    Args:
        module: where it is.
        name: its dotted name there.
        parameters: the names of its first parameters.
        by: the wrapper, with the arguments ``(wrapped, instance, args, kwargs)`` of wrapt; imported when it is called.
    """

    kind: ClassVar[str] = "wraps"

    module: str
    name: str
    parameters: tuple[str, ...]
    by: str
    target: str = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "target", f"{self.module}.{self.name}")

    def install(self) -> None:
        """Waits for the module."""
        _after_import(
            self.module, self.target, lambda module: wrapt.wrap_function_wrapper(module, self.name, self._call)
        )

    def _call(self, wrapped: Callable, instance: object, args: tuple, kwargs: dict) -> object:
        return pkgutil.resolve_name(self.by)(wrapped, instance, args, kwargs)

    def problem(self) -> str | None:
        """Says why the change is not in place, if it is not; see `Change`."""
        try:
            holder = pkgutil.resolve_name(self.target.rpartition(".")[0])
            current = inspect.getattr_static(holder, self.name.rpartition(".")[2])
        except (AttributeError, ImportError) as error:
            return f"the target does not exist: {error}"
        if problem := signature_problem(current, self.parameters):
            return problem
        return None if getattr(current, "_self_wrapper", None) == self._call else "it is not wrapped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegisteredAfterImport(Registered):
    """A `RegisteredAfterImport` is an entry in a registry that ``by`` makes, called with a module once it is imported.

    Args:
        module: the module that fills the registry.
    """

    module: str

    def install(self) -> None:
        """Waits for the module."""
        _after_import(self.module, self.target, lambda module: pkgutil.resolve_name(self.by)(module))

    def problem(self) -> str | None:
        """Says why the change is not in place, if it is not; see `Change`."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # whatever the import raises, or the change that follows it, is the finding
            return f"{type(error).__name__}: {error}"
        return super().problem()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFile(Change):
    """A `ConfigFile` is a choice in a configuration group of verl's, in a file of Orbit's; verl has none of that name.

    Args:
        name: group and name.
        base: verl's choice that it extends; None where there is none.
    """

    kind: ClassVar[str] = "adds a choice"

    name: str
    base: str | None = None
    target: str = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "target", f"verl.trainer.config/{self.name}")

    @property
    def by(self) -> str:
        """Names the file; see `Change`."""
        return f"orbit_verl/conf/{self.name}.yaml"

    def problem(self) -> str | None:
        """Says why the change is not in place, if it is not; see `Change`."""
        verl, orbit = (importlib.resources.files(package) for package in ("verl.trainer.config", "orbit_verl"))
        if not (orbit / "conf" / f"{self.name}.yaml").is_file():
            return f"{self.by} is not installed"
        if (verl / f"{self.name}.yaml").is_file():
            return "verl has a choice of that name itself"
        if self.base and not (verl / f"{self.base}.yaml").is_file():
            return f"verl has no {self.base}.yaml, which it extends"
        return None


def _after_import(module: str, target: str, change: Callable) -> None:
    """Makes a change once its module is imported; verl would hide the error, so it is logged and raised."""

    def make(imported: object) -> None:
        try:
            change(imported)
        except Exception as error:
            logger.error("orbit: the change to %s failed: %s: %s", target, type(error).__name__, error)
            raise

    wrapt.register_post_import_hook(make, module)
