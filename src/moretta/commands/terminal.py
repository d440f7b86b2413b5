"""What all commands share: what goes to which stream, options that many have, and which extra is missing.

So that a command's help comes at once, files of commands import what computes inside their functions.
"""

import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import RenderableType

from moretta.errors import MissingExtra
from moretta.report.terminal import PrintableStream, Screen, one_line

screen = Screen(stderr=True)
_printed = list[bool]()  # an object a command: there is one
_stdout = list[TextIO]()  # where that goes
_as_json = list[bool]()  # whether it is asked for

RunPath = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run the code that the run folder names, unasked.")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key.")]


def tell(line: str) -> None:
    """Write one line of progress for a person."""
    screen.print(one_line(line), soft_wrap=True)


def wants_json() -> bool:
    """Return whether the command line asks for an object, which is known before it is understood."""
    return "--json" in sys.argv[1:]


def print_error(sentence: str, code: int) -> None:
    """Print what went wrong as the one object on stdout, where the command line asks for one and none has been printed.

    A check that fails has printed what it found.
    """
    if wants_json() and not _printed:
        _print_object({"format": 1, "error": sentence, "exit_code": code})


def _print_object(result: Mapping[str, Any]) -> None:
    print(json.dumps(result), file=_stdout[0] if _stdout else sys.stdout, flush=True)


def begin() -> None:
    """Begin a command: what an earlier one of this process said and hushed is over.

    A sign that a terminal's encoding lacks is written as one that it has.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    unhush()
    _printed.clear()
    _stdout[:] = [sys.stdout]


def one_object() -> AbstractContextManager[object]:
    """Keep stdout for the object, where one is asked for: what users' own models and metrics print goes to stderr."""
    return redirect_stdout(sys.stderr) if wants_json() else nullcontext()


def speak(*, as_json: bool, quiet: bool) -> None:
    """Say the result of a command as one object, or for a person; quiet: show nothing more but errors."""
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
    """Say which extra is missing where one of these packages, which come with it, cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in packages:
            raise
        raise MissingExtra(f"this command needs {package}; install it by: pip install 'moretta[{extra}]'") from None


needs_torch = partial(needs, "torch", "torch", "sklearn", "matplotlib")


def allows_code(folder: Path, allow_code: bool, *, data: bool = False) -> bool:
    """Return whether the code that a run folder names may be imported: by the option, as the user's own, or as asked.

    data: whether that of its rows is needed too. Without a terminal nobody is asked, and the command refuses.
    """
    from moretta.config import run_files
    from moretta.run import consent

    if allow_code or consent.is_own(folder):
        return True
    if not (folder / "run.toml").exists() or not (sys.stdin.isatty() and screen.is_terminal):
        return False
    asked = consent.question(folder, run_files.of_folder(folder), data=data)
    return not asked or typer.confirm(f"{one_line(asked)}. Run it?", err=True)


def read(folder: Path, name: str) -> dict[str, Any]:
    """Return what a JSON file of a run folder holds."""
    from moretta.engines.run_folder import read_json

    return dict(read_json(folder / name))


def say(result: Mapping[str, Any], plainly: Callable[[], None]) -> None:
    """Print a command's result: as one JSON object, or for a person, unless nothing is to be said.

    plainly: Calls `print` and `show`; a terminal gets what they print as `moretta.report.terminal.printable`.
    """
    if any(_as_json):
        _print_object(result)
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

    say({"format": 1, **result}, plainly)


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """Let a SIGTERM end a command as ctrl-c does, so that what it started ends with it.

    sentence: printed then. The process ends there: threads of FLARE's, caught in the middle, might hold it for ever.
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
