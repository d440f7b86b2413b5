"""The common part of all commands: the streams, common options, and sentences about missing extras.

Modules of commands import heavy modules inside their functions, so that help is printed at once.
"""

import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import RenderableType

from moretta.errors import MissingExtra
from moretta.report.terminal import PrintableStream, Screen, one_line

screen = Screen(stderr=True)
_printed = list[bool]()  # whether the command's one object was printed
_stdout = list[TextIO]()  # the stream for it
_as_json = list[bool]()  # whether --json was given

RunPath = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run the run folder's code without asking.")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key. May repeat.")]


def tell(line: str) -> None:
    """Write one line of progress for a person."""
    screen.print(one_line(line), soft_wrap=True)


def wants_json() -> bool:
    """Return whether the command line has --json, also before it is parsed."""
    return "--json" in sys.argv[1:]


def print_error(sentence: str, code: int) -> None:
    """Print an error as the one object on stdout, under --json and unless a failed check has printed its findings."""
    if wants_json() and not _printed:
        _print_object({"format": 1, "error": sentence, "exit_code": code})


def _print_object(result: Mapping[str, Any]) -> None:
    print(json.dumps(result), file=_stdout[0] if _stdout else sys.stdout, flush=True)


def begin() -> None:
    """Begin a command: reset an earlier one's output; replace characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    unhush()
    _printed.clear()
    _stdout[:] = [sys.stdout]


def speak(*, as_json: bool, quiet: bool) -> None:
    """Choose how a command prints: its result as one object, or for a person; quiet: errors only."""
    _as_json[:] = [as_json]
    if not quiet:
        return
    screen.quiet = True
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)


def unhush() -> None:
    """Show everything again."""
    screen.quiet = False
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.WARNING)


@contextmanager
def needs(extra: str, *packages: str) -> Iterator[None]:
    """Name the extra to install if one of its packages cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in packages:
            raise
        raise MissingExtra(f"this command needs {package}; install it by: pip install 'moretta[{extra}]'") from None


needs_torch = partial(needs, "torch", "torch", "sklearn", "matplotlib")


def allows_code(folder: Path, allow_code: bool, *, data: bool = False) -> bool:
    """Return whether the code that a run folder names may run: by the option, as the user's own, or by an answer.

    Without a terminal the command cannot ask, and refuses.

    Args:
        data: Whether the code of its rows is needed too.
    """
    from moretta.config import run_files
    from moretta.run import consent

    if allow_code or consent.is_own(folder):
        return True
    if not (folder / "run.toml").exists() or not (sys.stdin.isatty() and screen.is_terminal):
        return False
    question = consent.question(folder, run_files.of_folder(folder), data=data)
    return not question or typer.confirm(f"{one_line(question)}. Run it?", err=True)


def read(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a run folder."""
    from moretta.engines.run_folder import read_json

    return dict(read_json(folder / name))


def say(result: Mapping[str, Any], plainly: Callable[[], None]) -> None:
    """Print a command's result: as one JSON object, or for a person unless --quiet is given.

    Args:
        plainly: Calls `print` and `show`; a terminal gets their text through `moretta.report.terminal.printable`.
    """
    if any(_as_json):
        _print_object({"format": 1, **result})
        _printed.append(True)
    elif not screen.quiet:
        with redirect_stdout(PrintableStream(sys.stdout)):
            plainly()


def show(*renderables: RenderableType) -> None:
    """Print tables and styled text on stdout."""
    stream = sys.stdout
    Screen(file=stream.raw if isinstance(stream, PrintableStream) else stream).print(*renderables, sep="\n")


def print_result(folders: Sequence[Path], differences: Mapping[str, float], result: dict[str, Any]) -> None:
    """Print the result of runs. result: the JSON object."""

    def plainly() -> None:
        from moretta.report.folder import read_run
        from moretta.report.table import SHOWN, classes, comparison
        from moretta.run.record import spent

        records = [read_run(folder) for folder in folders]
        show(comparison(records, differences).rich())
        if len(records) == 1 and (tables := records[0].test.classes) is not None:
            show(classes(tables, narrow=True).rich(SHOWN))
        for sentence in spent(result):
            print(f"privacy: {sentence}")
        print(f"run folder: {folders[0]}   (moretta report {folders[0]} makes its page)")

    say(result, plainly)


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """Let a SIGTERM end a command as ctrl-c does, so that the processes it started end too.

    The process exits at once, because interrupted threads of FLARE might block it forever.

    Args:
        sentence: Printed then.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        unhush()
        tell(f"moretta: {sentence}")
        print_error(sentence, 1)
        sys.stdout.flush()
        os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
