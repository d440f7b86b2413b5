"""The application of the shell's commands, its shared options and its exit codes.

Every command takes ``--json``: one object on stdout, progress on stderr; and ``--quiet``: errors only. Exit codes: 0
done, 1 failed, 2 bad usage or input, 3 rows left out. A failure is one sentence on stderr, and under ``--json`` an
object on stdout too.
"""

import errno
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, Any, NoReturn

import typer

from moretta.commands import align, compare, machines, models, report, rows, train
from moretta.commands.terminal import begin, needs_torch, print_error, say, screen, speak, unhush, wants_json
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common.entry import load
from moretta.protocols.registry import ENTRIES
from moretta.report.terminal import PrintableRecords, one_line

# typer includes click in some versions and depends on it in others.
UsageError: Any = typer.BadParameter.__base__


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only; with --json also the object.")]


def add_shared_options(app: typer.Typer) -> None:
    """Give every command of an application, including those of its groups, the options --json and --quiet."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _with_shared_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_shared_options(group.typer_instance)


def _with_shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with these options in its signature, which typer reads."""

    @functools.wraps(command)
    def called(*arguments: Any, as_json: bool = False, quiet: bool = False, **options: Any) -> Any:
        speak(as_json=as_json, quiet=quiet)
        return command(*arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in (("as_json", AsJson), ("quiet", Quiet))
    ]
    parameters = [*signature.parameters.values(), *shared]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def misused(error: Any) -> str:
    """Return one sentence about what is wrong with a command line. error: a `UsageError`."""
    path = "moretta" if error.ctx is None else error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; see {path} --help"


HELP = """Train one PyTorch model across organisations that keep their rows to themselves.

Exit codes: 0 done, 1 failed, 2 bad usage or input, 3 rows left out.
"""
_OF_PATHS: dict[type[OSError], str] = {
    FileNotFoundError: "there is no such file or folder; check the path",
    FileExistsError: "exists already; name another, or remove it",
    NotADirectoryError: "expected a directory, got a file or a path below one; name another",
    IsADirectoryError: "expected a file, got a directory; name a file",
    PermissionError: "you have no permission to read or write it; change its permissions, or name another",
}
_READ_ONLY = "the disk is read-only; name a path on another, or make the disk writable"
INTERRUPTED = 130  # typer's code for a ctrl-c without a sentence of a command
app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=HELP,
    epilog=f"Protocols: {', '.join(ENTRIES)}.",
)


def main() -> None:
    """Run a command; turn each failure into one sentence and an exit code."""
    begin()
    root = logging.getLogger()
    if (handler := logging.lastResort) is not None:  # shows warnings on stderr; users of Python set up their own
        handler.setFormatter(PrintableRecords())
        root.addHandler(handler)
    try:
        _call()
    except ParameterError as error:
        _fail(error, 2)
    except MorettaError as error:
        _fail(error, 1)
    except OSError as error:  # from an argument's path, or the disk
        where = "" if error.filename is None else f"{error.filename}: "
        reason = _READ_ONLY if error.errno == errno.EROFS else _OF_PATHS.get(type(error))
        _fail(f"{where}{reason or error.strerror or error}", 1 if reason is None else 2)
    except MemoryError:
        _fail("this machine is out of memory; use smaller files or batches, or a machine with more memory", 1)
    except Exception as error:  # our own mistake, whose traceback follows
        print_error(f"unexpected failure ({type(error).__name__}); the traceback is on stderr", 1)
        raise
    finally:
        if handler is not None:
            root.removeHandler(handler)


def _call() -> None:
    try:
        # Under --json stdout is for the object: prints of users' own models and metrics go to stderr.
        with redirect_stdout(sys.stderr) if wants_json() else nullcontext():
            code = app(standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it has shown its group's help
            sys.exit(error.exit_code)
        _fail(misused(error), error.exit_code)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _fail("interrupted", 1)
    sys.exit(code if isinstance(code, int) else 0)  # as the app does


def _fail(error: object, code: int) -> NoReturn:
    unhush()
    print_error(str(error), code)
    screen.print(one_line(f"moretta: {error}"), style="red", soft_wrap=True)
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
    _add(train.new, train.train, train.watch, rows.look, compare.compare, report.report, report.audit)
    _add(models.predict, models.evaluate, models.export)
    for entry in ENTRIES.values():
        if entry.commands:
            load(entry.commands)(app, needs_torch, say)
    _add(compare.reproduce, machines.serve, machines.join, machines.accept)
    _add(machines.job, machines.doctor)
    app.add_typer(report.dossier, name="dossier")
    app.add_typer(rows.schema, name="schema")
    app.add_typer(align.align, name="align")
    app.add_typer(machines.keys, name="keys")
    app.add_typer(machines.kit, name="kit")
    add_shared_options(app)


def _add(*commands: Callable[..., None]) -> None:
    for command in commands:
        app.command()(command)


_add_commands()
