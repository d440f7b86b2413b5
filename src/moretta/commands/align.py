"""`moretta align`: partners put their shared rows in one order, by files that they exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moretta.commands.rows import FileEncoding, Separator, form_of
from moretta.commands.terminal import say
from moretta.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moretta.data.alignment.partner import Alignment, IdRules

align = typer.Typer(
    no_args_is_help=True,
    help="Put the rows that partners share in one order without showing ids; all commands take --json.",
)

RowsPath = Annotated[Path, typer.Option("--rows", metavar="FILE", help="Your own rows: a table or an .npz file.")]
IdColumn = Annotated[str, typer.Option("--id-column", metavar="NAME", help="The column (or .npz array) of ids.")]
SecretPath = Annotated[Path, typer.Option("--secret", metavar="FILE", help="Your secrets; show them to nobody.")]
OutPath = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file for the other partner.")]
PadTo = Annotated[int | None, typer.Option("--pad-to", min=1, metavar="N", help="Pad the list of ids to length N.")]
Rules = Annotated[
    list[str] | None,
    typer.Option("--ids", metavar="RULE", help="A rule that normalises ids before they are compared: strip, unicode, "
                 "fold-case, drop-spaces, drop-punctuation, drop-zeros, or none. May repeat; default: the first 3."),
]  # fmt: skip
Earlier = Annotated[
    Path | None,
    typer.Option("--earlier", metavar="FILE", help="Continue from this alignment with an earlier partner."),
]
Result = Annotated[Path, typer.Option("--alignment", metavar="FILE", help="The file for the alignment.")]


@align.command()
def begin(
    rows: RowsPath,
    id_column: IdColumn,
    secret: SecretPath,
    out: OutPath = Path("step1.bin"),
    pad_to: PadTo = None,
    ids: Rules = None,
    earlier: Earlier = None,
    separator: Separator = None,
    file_encoding: FileEncoding = "utf-8",
) -> None:
    """Begin: write a blinded list of your own ids for the other partner."""
    from moretta.data.alignment import steps

    _check_files([out, secret], [rows, earlier])
    before = _earlier(earlier)
    rules = before.rules if before is not None and ids is None else _rules(ids)
    listed = read_ids(rows, id_column, separator, file_encoding)
    _hand_over(steps.begin(listed, rules, rows.name, pad_to, before), out, secret, 1)


@align.command()
def answer(
    step: Annotated[Path, typer.Argument(metavar="STEP1", help="The file of the partner that began.")],
    rows: RowsPath,
    id_column: IdColumn,
    secret: SecretPath,
    out: OutPath = Path("step2.bin"),
    pad_to: PadTo = None,
    ids: Rules = None,
    separator: Separator = None,
    file_encoding: FileEncoding = "utf-8",
) -> None:
    """Answer: read the blinded list of the partner that began, and write your own."""
    from moretta.data.alignment import steps

    _check_files([out, secret], [step, rows])
    listed = read_ids(rows, id_column, separator, file_encoding)
    _hand_over(steps.answer(step.read_bytes(), listed, _rules(ids), rows.name, pad_to), out, secret, 2)


@align.command()
def finish(
    step: Annotated[
        Path, typer.Argument(metavar="STEP", help="The other's file: step 2 if you began, 3 if you answered.")
    ],
    rows: RowsPath,
    id_column: IdColumn,
    secret: SecretPath,
    alignment: Result = Path("alignment.json"),
    out: OutPath = Path("step3.bin"),
    left: Annotated[
        Path, typer.Option("--left", metavar="FILE", help="With --earlier: remaining rows, for earlier partners.")
    ] = Path("left.bin"),
    earlier: Earlier = None,
    separator: Separator = None,
    file_encoding: FileEncoding = "utf-8",
) -> None:
    """Finish: find the shared rows, write the alignment and, if you began, step 3; the secrets are removed."""
    from moretta.data.alignment import steps
    from moretta.data.alignment.partner import NothingShared
    from moretta.engines.files import write_atomically

    own, before = secret.read_bytes(), _earlier(earlier)
    made = [alignment, *([out] if steps.begins(own) else []), *([left] if earlier is not None else [])]
    _check_files(made, [step, rows, secret, earlier])
    listed = read_ids(rows, id_column, separator, file_encoding)
    try:
        done = steps.finish(step.read_bytes(), own, listed, rows.name, before)
    except (NothingShared, steps.OtherRows):
        secret.unlink()  # the exchange has ended; the secret could only serve to learn more of the lists
        raise
    files = {out: done.step, left: done.left}
    written = {path: data for path, data in files.items() if data is not None}
    write_atomically(secret, done.secrets, mode=0o600)  # a killed process can continue with this list alone
    _write({**written, alignment: done.alignment.dump()})
    secret.unlink()
    last = done.alignment.steps[-1]
    result = {
        "rows": len(done.alignment.order),
        "listed": last.listed,
        "listed_there": last.listed_there,
        "digest": done.alignment.digest.hex(),
        "alignment": str(alignment),
        "out": [str(path) for path in written],
    }
    message = (
        f"{last.common} rows in common, of {last.listed} listed here and {last.listed_there} there: {alignment}; "
        "each partner now knows which of its own ids the other has"
    )
    say(result, lambda: print(message, *(f"hand over: {path}" for path in written), sep="\n"))


@align.command()
def narrow(
    left: Annotated[
        Path, typer.Argument(metavar="LEFT", help="The remaining rows, from the partner that aligned further.")
    ],
    alignment: Annotated[Path, typer.Option(metavar="FILE", help="The alignment with that partner.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file for the narrowed alignment.")],
) -> None:
    """Keep only the rows that a further partner also has."""
    from moretta.data.alignment import steps
    from moretta.data.alignment.partner import Alignment

    _check_files([out], [left, alignment])
    narrowed = steps.narrow(Alignment.load(alignment), left.read_bytes())
    narrowed.save(out)
    result = {"rows": len(narrowed.order), "digest": narrowed.digest.hex(), "alignment": str(out)}
    say(result, lambda: print(f"{len(narrowed.order)} rows are left: {out}"))


def read_ids(path: Path, column: str, separator: str | None, encoding: str | None) -> NDArray[np.generic]:
    """Return the ids of a file's rows, as training reads them.

    Args:
        separator, encoding: Of a .csv file.

    Raises:
        ParameterError: The file is no table or .npz file, or has no such column.
    """
    from numpy import asarray

    from moretta.contract.wording import did_you_mean
    from moretta.data.images.sets import read_npz
    from moretta.data.tables.files import ENDINGS, composed, is_table, read_columns
    from moretta.data.tables.rows import words_of

    if not is_table(path.name) and path.suffix != ".npz":
        raise ParameterError(f"{path.name}: expected rows in a file that ends in {', '.join(ENDINGS)} or .npz")
    form = form_of(separator, ".", encoding, [])
    columns = read_columns(path, form) if is_table(path.name) else read_npz(path)
    if column not in columns:
        raise ParameterError(f'{path.name} has no column "{column}" for --id-column; {did_you_mean(column, columns)}')
    ids = words_of(columns[column]).astype(str) if is_table(path.name) else columns[column]
    return asarray(composed(ids))


def _rules(names: Sequence[str] | None) -> IdRules:
    from moretta.data.alignment.partner import IdRules

    return IdRules.of(names) if names else IdRules()


def _earlier(path: Path | None) -> Alignment | None:
    from moretta.data.alignment.partner import Alignment

    return None if path is None else Alignment.load(path)


def _hand_over(made: tuple[bytes, bytes], out: Path, secret: Path, number: int) -> None:
    """Write a step for the other partner and the own secrets, or neither."""
    _write({secret: made[1], out: made[0]})
    result = {"step": number, "out": str(out), "secret": str(secret)}
    say(result, lambda: print(f"hand over: {out}\nkeep to yourself: {secret}"))


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all of these files for their owner alone, or none."""
    from moretta.data.alignment.partner import write_new

    written = list[Path]()
    try:
        for path, data in files.items():
            write_new(path, data)
            written.append(path)
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _check_files(outputs: Sequence[Path], inputs: Sequence[Path | None]) -> None:
    """Raise `moretta.errors.ParameterError` unless outputs are new files in existing folders, before any work."""
    names = [path.resolve() for path in (*outputs, *inputs) if path is not None]
    for path in outputs:
        if names.count(path.resolve()) > 1:
            raise ParameterError(f"{path} is named for two files of this step; name another for one of them")
        if path.exists():
            raise ParameterError(f"{path} exists already; remove it or name another file")
        if not path.parent.is_dir():
            raise ParameterError(f"{path}: there is no folder {path.parent}; make it or name another file")
