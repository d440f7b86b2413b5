"""`moretta new`, `train` and `watch`: a new project, a run file's model trained on this machine, a run's live page.

Training and audits show a bar on stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moretta.commands.terminal import Overrides, RunPath, needs_torch, print_result, say, screen, tell
from moretta.errors import RunFailed

if TYPE_CHECKING:
    from moretta.config import run_files
    from moretta.run.result import Result


def new(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The new project's folder.")],
) -> None:
    """Write a new project: generated tables, a model, a run file and a test."""
    from moretta.run.project import create

    files = [path.relative_to(name) for path in create(name)]

    def plainly() -> None:
        print(f"{name}: {', '.join(map(str, files))}")
        print(f"cd {name}; moretta train run.toml --out runs/{name.absolute().name}")

    say({"folder": str(name), "files": list(map(str, files))}, plainly)


def train_with_bar(run_file: run_files.RunFile, folder: Path, resume: bool, *, opening: bool = True) -> Result:
    """Train a run file's model into a run folder. Raises RunFailed on ctrl-c. opening: first print the rows."""
    from moretta.run.assembly import federation_of
    from moretta.run.preview import missing_in_audit, opening_of

    federation = federation_of(run_file, folder)

    def begin() -> None:
        for line in [*opening_of(federation), *missing_in_audit(federation)] if opening and not resume else ():
            tell(line)

    try:
        return federation.train(
            run_file.run.rounds, run_file.run.seed, resume=resume, begin=begin, progress=not screen.quiet
        )
    except KeyboardInterrupt:  # typer would only print that it aborted
        raise RunFailed(f"interrupted; {_left_in(folder)}") from None


def _left_in(folder: Path) -> str:
    """Return how to continue an interrupted run."""
    from moretta.engines.checkpoint import rounds_kept

    if rounds_kept(folder / "checkpoint"):
        return f"--resume continues {folder} from its last checkpoint"
    return f"{folder} has no checkpoint yet; remove it, and begin again" if folder.exists() else "nothing was written"


@contextmanager
def bar_of(name: str, interrupted: str, *, remaining: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar; yield the function that moves it, by the present work, the amount done, and the total.

    Args:
        interrupted: The sentence of the error.
        remaining: Show the remaining time, not the elapsed time.

    Raises:
        RunFailed: The user presses ctrl-c.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    time = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    with Progress(*columns, time, console=screen, transient=True) as bar:
        task = bar.add_task(name, total=None)
        try:
            yield lambda now, done, of: bar.update(task, description=now, completed=done, total=of)
        except KeyboardInterrupt:
            raise RunFailed(interrupted) from None


@contextmanager
def audit_bar(folder: Path) -> Iterator[Callable[[int, int, str], None]]:
    """Show an audit's bar; yields the function that moves it. Raises RunFailed on ctrl-c."""
    title = f"audit of {folder.name}"
    with bar_of(title, "interrupted; this audit wrote nothing") as move:
        yield lambda done, of, name: move(f"{title}: {name}", done, of)


Port = Annotated[int | None, typer.Option("--watch-port", help="The port of the live page.", min=0, max=65535)]
Watch = Annotated[bool, typer.Option("--watch", help="Serve a live page of the run on this machine.")]


@contextmanager
def page_of(folder: Path, watch: bool, port: int | None) -> Iterator[Callable[[str], None]]:
    """Serve the live page of a run, if requested, while the block lasts; yield a function that sends it a sentence."""
    if not watch and port is None:
        yield lambda sentence: None
        return
    from moretta.report.page_server import page_beside

    with page_beside(folder, port or 0, tell) as note:
        yield note


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a running or finished run.")],
    port: Annotated[int, typer.Option(help="The page's port; any free one by default.", min=0, max=65535)] = 0,
) -> None:
    """Serve a live page of a run on this machine until ctrl-c."""
    import secrets
    import threading

    from moretta.report.living import Status, check_run_folder, state_of
    from moretta.report.page_server import PageServer, address_of, listening

    check_run_folder(folder)
    listener, token = listening(port), secrets.token_urlsafe(32)
    with PageServer(listener, token, folder, Status()).serving(), suppress(KeyboardInterrupt):
        tell(f"the run's page is at {address_of(listener, token)} until ctrl-c")
        threading.Event().wait()
    say({"folder": str(folder), **state_of(folder, Status())}, lambda: None)


def train(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's last checkpoint.")] = False,
    watch: Watch = False,
    watch_port: Port = None,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Train the model of a run file, and write a run folder."""
    from moretta.config import run_files

    run_file = run_files.load(run, overrides)
    folder = out or run_file.folder
    with needs_torch(), page_of(folder, watch, watch_port):
        result = train_with_bar(run_file, folder, resume)
    print_result([folder], {}, dict(result.record))
