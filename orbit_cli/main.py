"""The ``orbit`` command."""

import logging
import warnings

import typer
from rich.console import Console

from orbit_cli import doctor as doctor_checks

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """RL post-training of frozen, low-precision language models through live adapter slots."""


@app.command()
def doctor() -> None:
    """Check versions, plugins and hooks, and say what cannot run on this machine and why.

    Exit status 1 when something that every run needs is broken.
    """
    console = Console(highlight=False)
    # The stack warns at length about what is not installed; what matters of that is in the report.
    logging.disable(logging.WARNING)
    with console.status("importing verl, SGLang and Megatron-Core"), warnings.catch_warnings(action="ignore"):
        checks = doctor_checks.run_checks()
    console.print(doctor_checks.table(checks))
    if any(check.state is doctor_checks.State.FAILED for check in checks):
        raise typer.Exit(1)
