"""`moretta look`: the rows of a run file or of one file, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moretta.commands.schema import Absent, Decimal, FileEncoding, Separator, form_of
from moretta.commands.terminal import AsJson, Overrides, needs_torch, say
from moretta.errors import ParameterError

MOST_WITHHELD = 1_000_000
LEAST_SHOWN = 5  # as `moretta.data.withholding` has it, which a command's help has no time to import


def look(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml|FILE", help="A run file, a table or an .npz file.")],
    out: Annotated[Path | None, typer.Option(help="Write a page with plots here, an .html file.")] = None,
    by_silo: Annotated[bool, typer.Option("--by-silo", help="Show each silo's counts, not only sums.")] = False,
    withhold: Annotated[int, typer.Option(help="Do not show counts below this.")] = LEAST_SHOWN,
    by: Annotated[
        Path | None, typer.Option("--schema", metavar="schema.toml", help="What a table's columns mean.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="A table's target, without a schema; the last column.")] = None,
    separator: Separator = None,
    decimal: Decimal = ".",
    file_encoding: FileEncoding = "utf-8",
    absent: Absent = [],  # noqa: B006  # typer reads the default, nothing writes to it
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Show how many rows there are, what is absent, and how values and classes are spread; train nothing."""
    from moretta.config import run_files
    from moretta.data.look import lines_of
    from moretta.data.tables.inference import Hints
    from moretta.run.preview import look_of_file, look_of_run

    if not 0 <= withhold <= MOST_WITHHELD:
        raise ParameterError(f"--withhold {withhold}: expected 0 to {MOST_WITHHELD:,}")
    name = file.name
    if file.suffix == ".toml":
        if by is not None or target is not None:
            raise ParameterError("--schema and --target go with a table; a run file names its own in [data]")
        run_file = run_files.load(file, overrides)
        name, found = run_file.run.name, look_of_run(run_file, withhold)
    elif overrides:
        raise ParameterError("--set goes with a run file")
    else:
        if by is not None and target is not None:
            raise ParameterError("--target goes with a table without a schema, and --schema names one; remove either")
        form = form_of(separator, decimal, file_encoding, absent)
        found = look_of_file(file, by, form, Hints(target, missing="mean"), withhold)
    told = {"format": 1, **found.told(withhold, by_silo=by_silo)}
    if out is not None:
        with needs_torch():
            from moretta.report.page import write_look

            told["page"] = str(write_look(told, name, out))

    def plainly() -> None:
        print(*lines_of(told), sep="\n")
        print(f"page: {out}" if out is not None else "--out page.html draws it")

    say(told, as_json, plainly)
