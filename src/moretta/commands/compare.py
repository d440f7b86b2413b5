"""`moretta compare`: several runs side by side, trained first if a run file is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moretta.commands.progress import audit_with_bar, train_with_bar
from moretta.commands.terminal import AllowCode, AsJson, Overrides, allows_code, needs_torch, read, say
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.config import run_files


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR... | RUN.toml", help="Run folders, or one run file.")],
    protocols: Annotated[
        str | None, typer.Option(help="With a run file: the protocols to run, for example fedsgd,pbpfl.")
    ] = None,
    variant: Annotated[
        list[str],
        typer.Option(
            metavar='"PROTOCOL KEY=VALUE ..."',
            help='A protocol with settings of its own, for example "pbpfl partitions=all". May repeat.',
        ),
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    audits: Annotated[
        bool, typer.Option("--audit", help="Also audit each run, and compare what each role could learn.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where the runs and report.html go; runs/NAME by default.")] = None,
    allow_code: AllowCode = False,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes to it
    as_json: AsJson = False,
) -> None:
    """Compare run folders, or run one run file by several protocols from the same seed and compare those."""
    given = runs[0] if len(runs) == 1 and runs[0].suffix == ".toml" else None
    if given is None and (protocols or variant or overrides):
        raise ParameterError("--protocols, --variant and --set go with one run file, not with run folders")
    with needs_torch():
        from moretta.run import comparison

        folders, home = runs, out
        if given is not None:
            if not protocols and not variant:
                raise ParameterError("comparing by a run file needs --protocols, for example --protocols fedsgd,pbpfl")
            from moretta.config import run_files

            run_file = run_files.load(given, overrides)
            home = out or run_file.folder
            named = [name.strip() for name in protocols.split(",")] if protocols else []
            folders = _train_each(run_file, home, named, variant, audits)
        elif home is not None:
            comparison.refuse_a_run(home)
        if audits:
            _audit_each(folders, given is not None, allow_code)
        differences, page = _write_page(folders, home)
    _print_comparison(folders, differences, as_json, page, audits)


def _train_each(
    run_file: run_files.RunFile, home: Path, protocols: Sequence[str], variants: Sequence[str], audits: bool
) -> list[Path]:
    """Train a run file by each protocol and variant, once none of them can be refused; return the run folders."""
    from moretta.run import comparison

    runs = comparison.variants(comparison.recording(run_file) if audits else run_file, protocols, variants)
    folders = [home / name for name in runs]
    comparison.refuse_a_run(home)
    comparison.refuse_existing(folders)
    comparison.rehearse(list(runs.values()))
    for number, (changed, folder) in enumerate(zip(runs.values(), folders, strict=True)):
        train_with_bar(changed, folder, resume=False, opening=number == 0)
    return folders


def _audit_each(folders: Sequence[Path], trained_here: bool, allow_code: bool) -> None:
    """Audit each run folder, once none of them can be refused. trained_here: by a run file that the user gave."""
    from moretta.run import auditing

    allowed = {folder: trained_here or allows_code(folder, allow_code, data=True) for folder in folders}
    for folder in folders:
        auditing.check_folder(folder, allowed[folder])
    for folder in folders:
        audit_with_bar(folder, allow_code=allowed[folder])


def _write_page(folders: Sequence[Path], home: Path | None) -> tuple[dict[str, float], Path | None]:
    """Return how far weights ended apart; write the comparison's page, and return its path, if there is a home."""
    from moretta.run import comparison

    differences = comparison.weight_differences(folders)
    if home is None:
        return differences, None
    from moretta.report.page import write_report

    return differences, write_report(folders, home / "report.html", differences)


def _print_comparison(
    folders: Sequence[Path], differences: Mapping[str, float], as_json: bool, page: Path | None, audits: bool
) -> None:
    from moretta.protocols.registry import REFERENCE
    from moretta.report.audit import leaks_table, side_by_side
    from moretta.report.folder import read_run
    from moretta.report.table import comparison_table

    runs = [read(folder, "result.json") for folder in folders]
    told: dict[str, Any] = {
        "runs": runs,
        f"weight_difference_from_{REFERENCE}": dict(differences),
        "report": None if page is None else str(page),
    }
    records = [read_run(folder) for folder in folders]
    if audits:
        told["runs"] = [run | {"audit": read(folder, "audit.json")} for run, folder in zip(runs, folders, strict=True)]
        told["leaks"] = side_by_side(records)

    def plainly() -> None:
        Console().print(comparison_table(records, differences))
        if any(record.audit is not None for record in records):
            Console().print(leaks_table(records))
        if page is not None:
            print(f"report: {page}")

    say(told, as_json, plainly)
