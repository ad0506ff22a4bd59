"""This module is the ``orbit`` command."""

import contextlib
import enum
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from orbit_cli import doctor as doctor_checks
from orbit_cli import slots

app = typer.Typer(add_completion=False, no_args_is_help=True)
for command in (slots.status, slots.stage, slots.activate, slots.rollback, slots.discard):
    app.command()(command)


@app.callback()
def main() -> None:
    """RL post-training of frozen, low-precision language models through live adapter slots."""


@app.command()
def doctor(
    server: Annotated[
        str | None, typer.Option(help="URL of a running server to ask first, e.g. http://127.0.0.1:30000.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=slots.KEY_VARIABLE, help="That server's key, if it has one. It is never printed."),
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="List every change that the plugins make to verl and SGLang instead.")
    ] = False,
) -> None:
    """Check versions, plugins and their changes, and say what cannot run on this machine and why.

    With --server also what a running server holds: slots, versions, requests, base. Exit status 1 when something that
    every run needs is broken, or the server cannot be reached, has no slots or refuses the key.
    """
    console = Console(highlight=False)
    if changes:
        with console.status("importing verl, SGLang and Megatron-Core"), _without_warnings():
            doctor_checks.choose_device()
            listed = [doctor_checks.changes_table(plugin) for plugin in doctor_checks.PLUGINS]
        if not console.is_terminal:
            console.width = doctor_checks.CHANGES_WIDTH
        console.print(*listed)
        return
    checks = []
    if server is not None:
        from orbit_cli.server_checks import server_checks

        checks = server_checks(server, api_key)
        console.print(doctor_checks.table(checks))
    with console.status("importing verl, SGLang and Megatron-Core"), _without_warnings():
        machine = doctor_checks.run_checks()
    console.print(doctor_checks.table(machine))
    if any(check.state is doctor_checks.State.FAILED for check in [*checks, *machine]):
        raise typer.Exit(1)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences the stack, which warns at length about what is not installed; what matters of that is in the report."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


class QuantizedFormat(enum.StrEnum):
    """These are the formats that ``orbit quantize`` writes."""

    FP8 = "fp8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


@app.command()
def quantize(
    model: Annotated[Path, typer.Option(help="BF16 checkpoint folder.")],
    format_name: Annotated[QuantizedFormat, typer.Option("--format", help="Format of the linears.")],
    out: Annotated[Path, typer.Option(help="Folder of the result; must not exist, or be empty.")],
    group_size: Annotated[
        int | None, typer.Option(help="Columns that share a scale (INT4), or rows and columns of a block (FP8).")
    ] = None,
    experts_only: Annotated[bool, typer.Option(help="Only the routed experts, as in Kimi-K2.")] = False,
) -> None:
    """Write a low-precision checkpoint in the format as deployed, from a BF16 one.

    Linears of the decoder layers are quantised; head, embeddings, norms and routers stay as they are. NVFP4's static
    input scales are set by a short run of the model on random tokens. Exit status 1, and nothing written, when it cannot
    be done.
    """
    # Importing torch costs seconds, which ``--help`` does without.
    from orbit_cli import rounding_errors
    from orbit_cli.quantize import quantize_checkpoint

    console = Console(highlight=False)
    try:
        with console.status(f"quantising to {format_name}"):
            errors = quantize_checkpoint(
                model, out, format_name=format_name, group_size=group_size, experts_only=experts_only
            )
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print(rounding_errors.table(errors, title=f"{out}: {format_name}"))
