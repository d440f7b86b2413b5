"""What every command has beside its own options: --quiet; and what is wrong with a command line, in a sentence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from moretta.commands.terminal import hush

# typer brings click along in some versions and depends on it in others.
UsageError: Any = typer.BadParameter.__base__


Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing but errors; under --json also the one object.")]


def add_quiet(app: typer.Typer) -> None:
    """Let every command of an application be quiet, those of its groups too."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _hushed(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_quiet(group.typer_instance)


def _hushed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the option of being quiet, as typer reads it from a signature."""

    @functools.wraps(command)
    def called(*arguments: Any, quiet: bool = False, **options: Any) -> Any:
        if quiet:
            hush()
        return command(*arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    if "quiet" in signature.parameters:  # by an earlier call
        return command
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    parameters = [*signature.parameters.values(), option]
    called.__dict__["__signature__"] = signature.replace(parameters=parameters)
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def misused(error: Any) -> str:
    """Return in one sentence what is wrong with a command line. error: a `UsageError`."""
    path = "moretta" if error.ctx is None else error.ctx.command_path
    return f"{error.format_message().rstrip('.')}; {path} --help says what there is"
