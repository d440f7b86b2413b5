"""Work that commands share and show as a bar on stderr: one run trained (`moretta.run.progress`), one run audited."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moretta.commands.terminal import screen, tell
from moretta.errors import RunFailed

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.config import run_files
    from moretta.run.federation import Result


def train_with_bar(run_file: run_files.RunFile, folder: Path, resume: bool, *, opening: bool = True) -> Result:
    """Train a run file's model into a run folder. Raises RunFailed if a person interrupts it.

    opening: whether to say first what it trains on.
    """
    from moretta.run.assembly import federation_of
    from moretta.run.preview import opening_of

    federation = federation_of(run_file, folder)

    def begin() -> None:
        for line in opening_of(federation) if opening and not resume else ():
            tell(line)

    try:
        return federation.train(
            run_file.run.rounds, run_file.run.seed, resume=resume, begin=begin, progress=not screen.quiet
        )
    except KeyboardInterrupt:  # typer would only say that it aborted
        raise RunFailed(f"interrupted; {_left_in(folder)}") from None


def _left_in(folder: Path) -> str:
    """Return how to go on after a run that was interrupted."""
    if any((folder / "checkpoint").glob("round-*")):
        return f"{folder} goes on from its last checkpoint by --resume"
    return f"{folder} has no checkpoint yet: remove it, and begin again" if folder.exists() else "nothing was written"


def audit_with_bar(
    folder: Path,
    thorough: bool = False,
    background: Path | None = None,
    needed: Iterable[str] = (),
    allow_code: bool = False,
    federation: str | None = None,
) -> Audit:
    """Audit a run folder. Raises RunFailed if a person interrupts it; `moretta.run.auditing` says the rest."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from moretta.run import auditing

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(f"audit of {folder.name}", total=None)

        def progress(done: int, of: int, name: str) -> None:
            bar.update(task, description=f"audit of {folder.name}: {name}", completed=done, total=of)

        try:
            return auditing.audit_folder(
                folder,
                thorough=thorough,
                background=background,
                progress=progress,
                needed=needed,
                allow_code=allow_code,
                federation=federation,
            )
        except KeyboardInterrupt:
            raise RunFailed("interrupted; nothing was written of this audit") from None
