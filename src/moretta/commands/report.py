"""`moretta report`, `audit` and `dossier`: pages about runs, attacks on them, and documents for assessments."""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from moretta.commands.terminal import AllowCode, allows_code, needs_torch, read, say, show
from moretta.commands.train import audit_bar
from moretta.errors import RunFailed


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page, an .html file; DIR/report.html by default.")] = None,
) -> None:
    """Write one self-contained HTML page about runs."""
    with needs_torch():
        from moretta.report.page import write_report
        from moretta.run import comparison

        page = write_report(folders, out or folders[0] / "report.html", comparison.weight_differences(folders))
    say({"report": str(page)}, lambda: print(page))


def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run with recorded views.")],
    thorough: Annotated[bool, typer.Option("--thorough", help="Also run slow attacks, for up to an hour.")] = False,
    background: Annotated[
        Path | None, typer.Option(help="The attackers' own rows, .npz with x and y; half the test rows by default.")
    ] = None,
    fail_above: Annotated[
        list[str], typer.Option("--fail-above", metavar="NAME=SCORE", help="Exit with 1 if NAME scores above SCORE.")
    ] = [],  # noqa: B006  # typer reads the default, nothing writes to it
    federation: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="For a run made from Python: returns its Federation."),
    ] = None,
    views: Annotated[
        bool, typer.Option("--views", help="DIR holds views recorded at Flower or FLARE sites; needs --federation.")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Attack a run's recorded messages, and report what each role could learn."""
    with needs_torch():
        from moretta.run import auditing

        limits = auditing.limits_of(fail_above)
        allowed = allows_code(folder, allow_code, data=True)
        with audit_bar(folder) as progress:
            outcome = auditing.audit_folder(
                folder,
                thorough=thorough,
                background=background,
                progress=progress,
                needed=limits,
                allow_code=allowed,
                federation=federation,
                views=views,
            )
    say(read(folder, "audit.json"), lambda: _print_audit(folder))
    if above := outcome.above(limits):
        raise RunFailed("; ".join(above.values()))


def _print_audit(folder: Path) -> None:
    from moretta.report.audit import audit_lines
    from moretta.report.folder import read_run
    from moretta.report.statements import verdict_text, verdicts

    record = read_run(folder)
    outcome = record.audit
    if outcome is None:  # it was just written by this command
        raise RunFailed(f"{folder / 'audit.json'} is gone")
    (verdict,) = verdicts([record])
    show(verdict_text(verdict), "", audit_lines(outcome))
    print(f"audit: {folder / 'audit.json'}   (moretta report {folder} shows it)")


File = Annotated[Path, typer.Argument(metavar="FILE", help="A dossier: its page or its JSON.")]


class WritesByDefault(TyperGroup):
    """`moretta dossier RUN` is `moretta dossier write RUN`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Add the command `write` if no command is named."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


dossier = typer.Typer(
    cls=WritesByDefault,
    no_args_is_help=True,
    help="Write a run's dossier for a data-protection impact assessment, sign it, and check its signatures. "
    "`moretta dossier RUN` writes it; all commands take --json.",
)


@dossier.command("write")
def write(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="The page, its JSON beside it; RUN/dossier.html by default.")] = None,
    answers: Annotated[
        Path | None, typer.Option(help="People's answers, a TOML file; RUN/dossier.toml by default.")
    ] = None,
) -> None:
    """Write the dossier of a run: a page for print, and a JSON file with the same sentences."""
    with needs_torch():
        from moretta.report.dossier.page import write_dossier

        written = write_dossier(folder, out, answers)
    open_ones, every = written.count("open"), written.count()
    result = {
        "dossier": str(written.files.page),
        "data": str(written.files.data),
        "sentences": every,
        "open": open_ones,
    }
    say(result, lambda: print(f"{written.files.page}: {every} sentences; {open_ones} questions are still open"))


@dossier.command("sign")
def sign(
    file: File,
    key: Annotated[Path, typer.Option(metavar="DIR", help="The folder of your identity, as `moretta keys` made it.")],
) -> None:
    """Add your signature to a dossier."""
    with needs_torch():
        from moretta.report.dossier import page
        from moretta.secure_aggregation.identity import Identity, fingerprint

        identity = Identity.load(key)
        files = page.sign(file, identity)
    result = {"signatures": str(files.signatures), "fingerprint": fingerprint(identity.public_key)}
    say(result, lambda: print(f"{files.signatures}: signed by {result['fingerprint']}"))


@dossier.command("verify")
def verify(
    file: File,
    roster: Annotated[Path, typer.Option(metavar="FILE", help="The roster that lists all identities.")],
) -> None:
    """Check who signed a dossier; exit with 1 if a file has changed since, or a signer is unknown."""
    with needs_torch():
        from moretta.report.dossier import page
        from moretta.secure_aggregation.identity import Roster

        checked = page.check(file, Roster.load(roster))
    result = {name: list(names) for name, names in vars(checked).items()}
    signed, missing = ", ".join(checked.signers) or "nobody", ", ".join(checked.missing) or "nobody"
    say(result, lambda: print(f"signed by: {signed}\nnot signed by: {missing}"))
    if checked.fault:
        raise RunFailed(f"{file}: {checked.fault}")
