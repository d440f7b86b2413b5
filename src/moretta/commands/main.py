"""What a shell user calls.

Every command takes ``--json``: one object on stdout, progress on stderr. Exit codes: 0 done, 1 failed, 2 bad usage or
input; a failure is one sentence on stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from moretta.commands import (
    align,
    audit,
    compare,
    dossier,
    keys,
    look,
    machines,
    models,
    new,
    report,
    reproduce,
    schema,
    train,
    watch,
)
from moretta.commands.terminal import needs_torch, say, screen
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common.entry import load
from moretta.protocols.registry import ENTRIES

HELP = """Train one PyTorch model across organisations, where nobody says more than the protocol needs.

Exit codes: 0 done, 1 failed, 2 bad usage or input.
"""
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=HELP,
    epilog=f"Protocols: {', '.join(ENTRIES)}.",
)


def main() -> None:
    """Run a command; turn what goes wrong into one sentence and an exit code."""
    root = logging.getLogger()
    if (handler := logging.lastResort) is not None:  # shows warnings on stderr; Python's users set up their own
        root.addHandler(handler)
    try:
        app()
    except ParameterError as error:
        _fail(error, 2)
    except MorettaError as error:
        _fail(error, 1)
    except OSError as error:  # of a path that was given, or of the disk
        given = isinstance(error, FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError)
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{where}{error.strerror or error}", 2 if given or isinstance(error, PermissionError) else 1)
    finally:
        if handler is not None:
            root.removeHandler(handler)


def _fail(error: object, code: int) -> None:
    screen.print(f"moretta: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from moretta import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _add_commands() -> None:
    """Add all commands, in the order in which the help lists them."""
    _add(new.new, train.train, watch.watch, look.look, compare.compare, report.report, audit.audit)
    _add(models.predict, models.export)
    for entry in ENTRIES.values():
        if entry.commands:
            load(entry.commands)(app, needs_torch, say)
    _add(reproduce.reproduce, machines.serve, machines.join, machines.job, machines.doctor)
    app.add_typer(dossier.dossier, name="dossier")
    app.add_typer(schema.schema, name="schema")
    app.add_typer(align.align, name="align")
    app.add_typer(keys.keys, name="keys")
    app.add_typer(machines.kit, name="kit")


def _add(*commands: Callable[..., None]) -> None:
    for command in commands:
        app.command()(command)


_add_commands()
