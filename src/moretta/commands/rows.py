"""`moretta look` and `schema`: a look at rows before training, and schemas of tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moretta.commands.terminal import Overrides, needs_torch, say
from moretta.contract.wording import LEAST_SHOWN
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.data.tables.files import Format


schema = typer.Typer(no_args_is_help=True, help="Propose, check and convert schemas; every command takes --json.")

TablePath = Annotated[Path, typer.Argument(metavar="FILE", help="A table: .csv, .csv.gz, .parquet or .arrow.")]
Separator = Annotated[str | None, typer.Option(help="The separator of a .csv file: , ; | tab, or a blank.")]
Decimal = Annotated[str | None, typer.Option(help="The decimal sign of a .csv file: . or ,")]
FileEncoding = Annotated[str | None, typer.Option(help="The encoding of a .csv file, such as latin-1.")]
Absent = Annotated[list[str], typer.Option(help="A word that stands for no value, such as n/a. May repeat.")]


def form_of(separator: str | None, decimal: str | None, file_encoding: str | None, absent: list[str]) -> Format:
    """Return the form of a .csv file. Raises `moretta.errors.ParameterError` for another sign."""
    from moretta.data.tables.files import Format

    return Format(**format_fields(separator, decimal, file_encoding, absent))


def format_fields(
    separator: str | None, decimal: str | None, file_encoding: str | None, absent: list[str]
) -> dict[str, Any]:
    """Return the fields of `Format` that are set."""
    separator = "\t" if separator in ("tab", "\\t") else separator
    options = {"separator": separator, "decimal": decimal, "encoding": file_encoding, "absent": tuple(absent) or None}
    return {name: value for name, value in options.items() if value is not None}


@schema.command("init")
def init(
    file: TablePath,
    out: Annotated[Path, typer.Option(help="The file for the proposal; an existing one is not overwritten.")] = Path(
        "schema.toml"
    ),
    target: Annotated[str | None, typer.Option(help="The column to predict; the last one by default.")] = None,
    id_column: Annotated[str | None, typer.Option(help="The column of ids, if it does not look like one.")] = None,
    header: Annotated[
        bool, typer.Option("--header", help="The first line holds the columns' names, although it looks like a row.")
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    file_encoding: FileEncoding = "utf-8",
    absent: Absent = [],  # noqa: B006  # typer reads the default, nothing writes to it
) -> None:
    """Propose a schema for a table. Read it, answer its questions, and name it in \\[data] schema."""
    from moretta.data.tables.doubts import Hints
    from moretta.data.tables.files import read_columns
    from moretta.data.tables.inference import as_toml, lines_of, propose
    from moretta.data.tables.schema import Schema
    from moretta.engines.files import write_atomically

    if out.exists():
        raise ParameterError(f"{out} exists already; remove it, or name another file by --out")
    form = form_of(separator, decimal, file_encoding, absent)
    hints = Hints(target, id_column=id_column, missing="mean", header=header)
    guesses = propose(read_columns(file, form), hints, file.name, form)
    write_atomically(out, as_toml(guesses).encode())
    doubts = {name: str(guess.doubt) for name, guess in guesses.items() if guess.doubt is not None}
    lines = lines_of(Schema.model_construct(columns={name: guess.column for name, guess in guesses.items()}))
    result = {"schema": str(out), "columns": {n: g.column.kind for n, g in guesses.items()}, "decide": doubts}

    def show() -> None:
        print(*lines, sep="\n")
        for name, doubt in doubts.items():
            print(f"decide: {name} {doubt}")
        print(out)

    say(result, show)


@schema.command("check")
def check(
    file: TablePath,
    by: Annotated[Path, typer.Option("--schema", metavar="schema.toml", help="The table's schema.")],
    separator: Separator = None,
    decimal: Decimal = ".",
    file_encoding: FileEncoding = "utf-8",
    absent: Absent = [],  # noqa: B006
) -> None:
    """Read a table by a schema, and report by column what does not fit."""
    from moretta.data.tables import schema as schemas
    from moretta.data.tables.inference import lines_of
    from moretta.data.tables.rows import read_table

    schema = schemas.load(by)
    rows = read_table(
        file, schema, form_of(separator, decimal, file_encoding, absent), labelled=schema.target is not None
    )
    result = {"rows": len(rows.x), "inputs": rows.x.shape[1], "digest": schema.digest}

    def show() -> None:
        print(*lines_of(schema), sep="\n")
        print(f"{len(rows.x)} rows, {rows.x.shape[1]} inputs; the schema's digest begins with {schema.digest[:32]}")

    say(result, show)


@schema.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(metavar="SCHEMA", help="A schema.toml, or a Table Schema: a .json file.")],
    out: Annotated[Path, typer.Option(help="The converted file, .json or .toml; an existing one is not overwritten.")],
    target: Annotated[
        str | None, typer.Option(help="The column to predict, if the Table Schema does not name it.")
    ] = None,
) -> None:
    """Convert a schema to a Table Schema (Frictionless) or back, and list what is lost."""
    from moretta.data.tables import schema as schemas
    from moretta.data.tables.doubts import plain_form
    from moretta.data.tables.inference import Guess, as_toml
    from moretta.data.tables.table_schema import written
    from moretta.engines.files import check_ending, write_atomically

    check_ending(out, ".json", ".toml")
    if out.exists():
        raise ParameterError(f"{out} exists already; remove it, or name another file by --out")
    if target is not None and file.suffix != ".json":
        raise ParameterError(f"--target is for a Table Schema, a .json file, and {file} names its own; remove it")
    schema, unkept = schemas.read(file, target)
    as_json = out.suffix == ".json"
    forms = {name: plain_form(column) for name, column in schema.columns.items()}
    text = written(forms) if as_json else as_toml({name: Guess(column) for name, column in schema.columns.items()})
    write_atomically(out, text.encode())
    say(
        {"schema": str(out), "not_kept": unkept},
        lambda: print(*(f"not kept: {note}" for note in unkept), out, sep="\n"),
    )


MOST_WITHHELD = 1_000_000


def look(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml|FILE", help="A run file, a table or an .npz file.")],
    out: Annotated[Path | None, typer.Option(help="Also write a page with plots, an .html file.")] = None,
    by_silo: Annotated[bool, typer.Option("--by-silo", help="Show each silo's counts besides the sums.")] = False,
    withhold: Annotated[int, typer.Option(help="Withhold counts below this.")] = LEAST_SHOWN,
    by: Annotated[Path | None, typer.Option("--schema", metavar="schema.toml", help="The table's schema.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Without a schema: the target; the last column by default.")
    ] = None,
    separator: Separator = None,
    decimal: Decimal = ".",
    file_encoding: FileEncoding = "utf-8",
    absent: Absent = [],  # noqa: B006  # typer reads the default, nothing writes to it
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Count rows, absent values and classes, and show how values are distributed; train nothing."""
    from moretta.config import run_files
    from moretta.data.look import lines_of
    from moretta.data.tables.doubts import Hints
    from moretta.run.preview import look_of_file, look_of_run

    if not 0 <= withhold <= MOST_WITHHELD:
        raise ParameterError(f"--withhold {withhold}: expected 0 to {MOST_WITHHELD:,}")
    name = file.name
    if file.suffix == ".toml":
        if by is not None or target is not None:
            raise ParameterError("--schema and --target need a table, got a run file; set them in its [data]")
        run_file = run_files.load(file, overrides)
        name, overview = run_file.run.name, look_of_run(run_file, withhold)
    elif overrides:
        raise ParameterError("--set needs a run file, got a table; remove it")
    else:
        if by is not None and target is not None:
            raise ParameterError("--target is for a table without a schema, and --schema names one; remove either")
        form = form_of(separator, decimal, file_encoding, absent)
        overview = look_of_file(file, by, form, Hints(target, missing="mean"), withhold)
    result = overview.plain(withhold, by_silo=by_silo)
    if out is not None:
        with needs_torch():
            from moretta.report.page import write_look

            result["page"] = str(write_look(result, name, out))

    def plainly() -> None:
        print(*lines_of(result), sep="\n")
        print(f"page: {out}" if out is not None else "--out page.html draws it")

    say(result, plainly)
