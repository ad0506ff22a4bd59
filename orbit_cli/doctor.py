"""This module has the checks of ``orbit doctor``.

They say what is installed, whether the plugins are in, and what this machine cannot do.
"""

import dataclasses
import enum
import importlib
import importlib.metadata
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from orbit_kernels.upstream.ledger import State as ChangeState
from orbit_kernels.upstream.ledger import Status, counts

REPOSITORY = Path(__file__).resolve().parent.parent
PINS_FILE = REPOSITORY / "requirements" / "stack.txt"
CORE_PACKAGES = (
    "verl",
    "sglang",
    "torch",
    "transformers",
    "megatron-core",
    "tensordict",
    "transferqueue",
    "kernels",
    "peft",
    "ray",
)
_FIX = "run make setup"
NVIDIA_DEVICE = Path("/dev/nvidia0")
"""The first GPU, as the driver shows it."""
CHANGES_WIDTH = 200
"""The list of changes has these columns where no terminal says how many there are."""


class State(enum.Enum):
    """A state says what a check found; ``MISSING`` is something that this machine lacks and a CPU run does not need."""

    OK = "[green]ok[/green]"
    FAILED = "[red]failed[/red]"
    MISSING = "[yellow]not here[/yellow]"


@dataclasses.dataclass(frozen=True)
class Check:
    """A ``Check`` is one line of the report."""

    subject: str
    state: State
    detail: str


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A ``Plugin`` is one of Orbit's plugins, as its host loads it.

    Args:
        host: the host package.
        group: the entry-point group that the host reads.
        load: makes the host load its plugins, as in a run.
        module: where its ``LEDGER`` is.
    """

    host: str
    group: str
    load: Callable[[], object]
    module: str


def _load_verl_plugins() -> None:
    importlib.import_module("verl")


def _load_sglang_plugins() -> None:
    importlib.import_module("sglang.srt.plugins").load_plugins()


PLUGINS = (
    Plugin("verl", "verl.plugins", _load_verl_plugins, "orbit_verl.upstream.imports"),
    Plugin("sglang", "sglang.srt.plugins", _load_sglang_plugins, "orbit_sglang.upstream.hooks"),
)


def run_checks() -> list[Check]:
    """Runs every check in order; it imports verl and SGLang, which takes from seconds to a minute."""
    has_cuda = choose_device()
    checks = version_checks(PINS_FILE)
    for plugin in PLUGINS:
        checks += plugin_checks(plugin)
    return checks + device_checks(has_cuda)


def choose_device() -> bool:
    """Returns whether there is CUDA.

    Without it verl and SGLang, which decide when they are imported, are told to use the CPU.
    """
    has_cuda = _has_cuda()
    if not has_cuda:
        os.environ.setdefault("VERL_PLATFORM", "orbit_cpu")
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    return has_cuda


def table(checks: Iterable[Check]) -> Table:
    """Returns the report as a table."""
    report = Table(
        "state", "subject", Column("detail", overflow="fold"), box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    for check in checks:
        report.add_row(check.state.value, escape(check.subject), escape(check.detail))
    return report


def version_checks(pins_file: Path) -> list[Check]:
    """Checks the installed core packages against their pins."""
    pins = read_pins(pins_file)
    return [_version_check(name, pins[name]) for name in CORE_PACKAGES]


def read_pins(pins_file: Path) -> dict[str, str]:
    """Reads versions by lower-case package name, from lines ``name==version``."""
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", pins_file.read_text(), re.M)}


def plugin_checks(plugin: Plugin) -> list[Check]:
    """Checks that the entry point is found, loads, and has all its changes in place."""
    subject = f"{plugin.host} plugin"
    found = importlib.metadata.entry_points(group=plugin.group, name="orbit")
    if not found:
        return [Check(subject, State.FAILED, f"no entry point orbit in {plugin.group}; {_FIX}")]
    try:
        plugin.load()
        if plugin.module.partition(".")[0] not in sys.modules:
            return [
                Check(
                    subject, State.FAILED, f"{plugin.host} did not load it: is it left out by an environment variable?"
                )
            ]
        report = importlib.import_module(plugin.module).LEDGER.report()
    except Exception as error:  # whatever an import of the stack raises is the finding
        return [Check(subject, State.FAILED, f"does not load: {type(error).__name__}: {error}")]
    failed = [
        Check(subject, State.FAILED, f"{status.change.target}: {status.problem}; {_FIX}")
        for status in report
        if status.problem is not None
    ]
    if not report:
        return [Check(subject, State.FAILED, "has no changes")]
    return failed or [Check(subject, State.OK, f"active, {summary(report)}")]


def summary(report: Sequence[Status]) -> str:
    """Says how many changes a plugin makes, where they are needed, and how many are in place here."""
    needed = ", ".join(f"{count} on {device}" for device, count in counts(report).items())
    states = Counter(status.state for status in report)
    found = ", ".join(f"{states[state]} {state}" for state in ChangeState if states[state])
    return f"{len(report)} changes ({needed}): {found}"


def changes_table(plugin: Plugin) -> Table:
    """Lists every change that a plugin makes: what, how, why, until when, and its state in this process."""
    plugin.load()
    columns = (Column(name, overflow="fold") for name in ("target", "kind", "why", "until", "state"))
    listed = Table(*columns, title=f"changes to {plugin.host}", padding=(0, 1))
    for section, statuses in itertools.groupby(
        importlib.import_module(plugin.module).LEDGER.report(), key=lambda status: status.section
    ):
        listed.add_section()
        listed.add_row(f"[bold]{section}[/bold]")
        for status in statuses:
            change = status.change
            state = f"{status.state}: {status.problem}" if status.problem else str(status.state)
            listed.add_row(*map(escape, (change.target, change.kind, change.why, change.until, state)))
    return listed


def device_checks(has_cuda: bool) -> list[Check]:
    """Checks the device, and says what cannot run on it."""
    if has_cuda:
        import torch

        properties = torch.cuda.get_device_properties(0)
        count, memory_gb = torch.cuda.device_count(), properties.total_memory / 1e9
        return [Check("device", State.OK, f"{count} x {properties.name}, {memory_gb:.0f} GB each")]
    if NVIDIA_DEVICE.exists():
        return [
            Check(
                "device", State.FAILED, f"{NVIDIA_DEVICE} is there, but torch finds no CUDA device: {_cuda_problem()}"
            )
        ]
    flags = cpu_flags()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    checks = [
        Check("device", State.OK, f"CPU, {os.cpu_count()} cores ({', '.join(features)}), {memory_gb:.0f} GB"),
        Check("GPU tests, make test-gpu", State.MISSING, "torch finds no CUDA device"),
        Check("CUDA graphs, NCCL, GPU kernels", State.MISSING, "no CUDA device; plain torch and gloo do their work"),
    ]
    if "amx_tile" not in flags:
        reason = "the processor has no AMX; attention backend torch_native does their work"
        checks.append(Check("SGLang's CPU kernels", State.MISSING, reason))
    return checks


def _cuda_problem() -> str:
    """Returns what torch says about CUDA, and what most often helps."""
    import torch

    try:
        torch.cuda.init()
        said = "it gives no reason"
    except (RuntimeError, AssertionError) as error:
        said = str(error)
    return f"{said}; install a driver for CUDA {torch.version.cuda} or newer, and check CUDA_VISIBLE_DEVICES"


def cpu_flags() -> set[str]:
    """Returns the instruction sets of the processor by Linux's names; empty on other systems and architectures."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return set(match[1].split()) if match else set()


def _version_check(name: str, pinned: str) -> Check:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, State.FAILED, f"not installed, pinned is {pinned}; {_FIX}")
    if installed.partition("+")[0] != pinned:
        return Check(name, State.FAILED, f"{installed} is installed, pinned is {pinned}; {_FIX}")
    return Check(name, State.OK, installed)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
