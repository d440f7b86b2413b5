"""Work that commands share and show as a bar on stderr: one run trained, one run audited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moretta.commands.terminal import screen, tell
from moretta.errors import MorettaError, RunFailed

if TYPE_CHECKING:
    from moretta.audit.auditor import Audit
    from moretta.config import run_files
    from moretta.run.federation import Result


def train_with_bar(run_file: run_files.RunFile, folder: Path, resume: bool, *, opening: bool = True) -> Result:
    """Train a run file's model into a run folder. Raises RunFailed if a person interrupts it.

    opening: whether to say first what it trains on.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from moretta.run.assembly import federation_of
    from moretta.run.looking import opening_of

    federation = federation_of(run_file, folder)

    def begin() -> None:
        for line in opening_of(federation) if opening and not resume else ():
            tell(line)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(run_file.protocol.name, total=run_file.run.rounds, figures="")

        def progress(number: int, rounds: int, line: Mapping[str, Any]) -> None:
            for gone in line["dropped"]:
                bar.console.print(f"round {gone['round']}: {gone['silo']} {gone['reason']}", markup=False)
            figures = {"loss": line.get("loss"), "test": line.get("test_accuracy", line.get("test_mse"))}
            text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)
            bar.update(task, completed=number)
            if text:
                bar.update(task, figures=text)

        try:
            return federation.train(
                run_file.run.rounds, run_file.run.seed, resume=resume, progress=progress, begin=begin
            )
        except KeyboardInterrupt:  # typer would only say that it aborted
            raise RunFailed(f"interrupted; {folder} goes on from its last checkpoint by --resume") from None
        except (MorettaError, OSError):
            bar.live.transient = not bar.tasks[task].completed  # what never began is told by its sentence alone
            raise


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

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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
