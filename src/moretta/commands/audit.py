"""`moretta audit`: what each role of a recorded run could learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.progress import audit_with_bar
from moretta.commands.terminal import AllowCode, AsJson, allows_code, needs_torch, read, say, show
from moretta.errors import RunFailed


def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run with recorded views.")],
    thorough: Annotated[bool, typer.Option("--thorough", help="Also slow attacks; up to an hour.")] = False,
    background: Annotated[
        Path | None, typer.Option(help="Rows that attackers may have: .npz with x and y; else half of the test rows.")
    ] = None,
    fail_above: Annotated[
        list[str], typer.Option("--fail-above", metavar="NAME=SCORE", help="Exit 1 where an attack scores more.")
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    federation: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Of a run made from Python: what returns its Federation."),
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Attack what a run recorded, and say what each role could learn."""
    with needs_torch():
        from moretta.run import auditing

        limits = auditing.limits_of(fail_above)
        allowed = allows_code(folder, allow_code, data=True)
        found = audit_with_bar(folder, thorough, background, limits, allowed, federation)
    say(read(folder, "audit.json"), as_json, lambda: _print_audit(folder))
    if above := found.above(limits):
        raise RunFailed("; ".join(above.values()))


def _print_audit(folder: Path) -> None:
    from moretta.report.audit import audit_lines
    from moretta.report.folder import read_run
    from moretta.report.statements import verdict_text, verdicts

    record = read_run(folder)
    found = record.audit
    if found is None:  # it was just written
        raise RunFailed(f"{folder / 'audit.json'} is gone")
    (verdict,) = verdicts([record])
    show(verdict_text(verdict), "", audit_lines(found))
    print(f"audit: {folder / 'audit.json'}   (moretta report {folder} shows it)")
