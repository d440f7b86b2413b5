"""Tables: a CSV file as numbers, with its absent values.

Strings are encoded here, over the whole table, because all owners need the same columns. Absent values stay NaN until
the rows are split. Each owner then fills in its *own* median (`fill_missing`), so no value moves between owners.
"""

import csv
import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moretta.contract.wording import check_choice, did_you_mean
from moretta.errors import ParameterError

Task = Literal["classification", "regression"]
Encoding = Literal["one-hot", "ordinal"]
MissingValues = Literal["error", "median", "indicator"]
ABSENT = frozenset({"", "NA", "NaN", "nan", "?"})
ABSENT_CATEGORY = "missing"
MOST_CATEGORIES = 1000


@dataclass(frozen=True, eq=False)
class Table:
    """An encoded table: x float32[n, d] (NaN where a value is absent), a name per column, and raw targets.

    y is int64[n] if the target column holds integers or strings (then `class_names` has a name per class), else
    float64[n]. `missing_columns` are the columns of x with an absent value in any row. `origins` has, for each column
    of x, the column of the file that it was encoded from, and `ids` str[n] the cells of the id column, if one is named.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    missing_columns: tuple[int, ...]
    origins: tuple[str, ...]
    ids: NDArray[np.str_] | None


def read_table(
    path: Path,
    *,
    target: str | None = None,
    task: Task | None = None,
    encoding: Encoding = "one-hot",
    missing: MissingValues = "error",
    drop: tuple[str, ...] = (),
    id_column: str | None = None,
    labelled: bool = True,
) -> Table:
    """Read a .csv or .csv.gz file: UTF-8, a header, ',' or ';' between cells, quotes and CRLF understood.

    The target is the column named `target`, or the last. Without `labelled` there is no target, and a column of that
    name is left out. Numeric columns stay; other columns become one 0/1 column per category ("one-hot") or the
    category's number in sorted order ("ordinal"). An empty cell, NA, NaN or ? is absent: refused with missing =
    "error", else NaN in a numeric column and a category of its own, "missing", in the others. The column named
    `id_column` is no feature, and none of its cells may be absent.
    Raises ParameterError, naming the file and the column or line, for anything that cannot be read so.
    """
    check_choice("encoding", encoding, get_args(Encoding))
    check_choice("missing", missing, get_args(MissingValues))
    header, columns = cells_of(read_bytes(path), path.name)
    repeated = sorted({name for name in header if header.count(name) > 1})
    if "" in header or repeated:
        what = f"repeats the column {repeated[0]!r}" if repeated and repeated[0] else "has a column without a name"
        raise ParameterError(f"{path.name}: the header {what}; give each column its own name, or remove it")
    wanted = target if target is not None or not labelled else header[-1]
    if wanted is not None and wanted not in header:
        raise ParameterError(f'{path.name} has no column "{wanted}" for the target; {did_you_mean(wanted, header)}')
    if id_column is not None and id_column not in header:
        raise ParameterError(
            f'{path.name} has no column "{id_column}" for id-column; {did_you_mean(id_column, header)}'
        )
    if id_column is not None and id_column == wanted:
        which = "the last column, and so the target as none is named" if target is None else "the target too"
        raise ParameterError(f'{path.name}: id-column "{wanted}" is {which}; name another column as target')
    kept = [name for name in header if name not in (wanted, id_column, *drop)]
    if not kept:
        raise ParameterError(f"{path.name} has no column beside the target {wanted!r}; expected at least one")
    always = [name for name in (id_column, wanted) if name is not None]
    complete = [*kept, *always] if missing == "error" else always
    _refuse_absent(path, {name: columns[name] for name in complete}, wanted, id_column)
    blocks: list[NDArray[np.float32]] = []
    names: list[str] = []
    origins: list[str] = []
    for name in kept:
        block, block_names = _encode(name, columns[name], encoding, path)
        blocks.append(block)
        names += block_names
        origins += [name] * len(block_names)
    x = np.concatenate(blocks, axis=1)
    y, class_names = (np.empty(0), ()) if wanted is None else targets_of(columns[wanted], wanted, task, path)
    ids = None if id_column is None else np.array(columns[id_column], np.str_)
    return Table(x, y, tuple(names), class_names, absent_columns(x), tuple(origins), ids)


def absent_columns(x: NDArray[Any]) -> tuple[int, ...]:
    """The columns of x [n, d] in which a value is absent, NaN, in any row."""
    return tuple(int(j) for j in np.flatnonzero(np.isnan(x).any(0)))


def fill_missing(
    x: NDArray[Any], how: MissingValues, names: tuple[str, ...], owner: str, columns: tuple[int, ...] | None = None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Fill NaN in x [n, d] with the owner's own column medians; returns the filled (x, names), x itself untouched.

    "indicator" also appends a 0/1 column, 1 where the value was absent, for each of `columns`: those with an absent
    value in the whole table (`Dataset.missing_columns`), so that all owners have the same columns; by default those of
    x. "error" changes nothing. Raises ParameterError, naming the owner, for a column without any value.
    """
    if how == "error" or x.ndim != 2 or x.dtype.kind != "f":
        return x, names
    absent = np.isnan(x)
    lacking = absent_columns(x)
    marked = list(lacking if columns is None else columns)
    filled = x.copy()
    for j in lacking:
        column = names[j] if names else str(j)
        if absent[:, j].all():
            raise ParameterError(
                f"{owner} has no value at all in column {column!r}, so there is no median to fill in; "
                "leave the column out or split the rows otherwise"
            )
        filled[absent[:, j], j] = np.median(x[~absent[:, j], j].astype(np.float64))
    if how == "median" or not marked:
        return filled, names
    labels = tuple(f"{names[j] if names else j}={ABSENT_CATEGORY}" for j in marked)
    return np.concatenate([filled, absent[:, marked].astype(x.dtype)], axis=1), (*names, *labels) if names else ()


def cells_of(content: bytes, name: str) -> tuple[list[str], dict[str, list[str]]]:
    """The header of a CSV file and each column's cells, stripped, absent ones as the empty string.

    name: the file's. Raises ParameterError for what is no UTF-8 text, no CSV, has no rows, or rows of another length.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParameterError(f"{name} is not UTF-8 text (byte {error.start}); save it as CSV in UTF-8") from error
    first = next(iter(text.splitlines()), "")
    delimiter = max(",;", key=lambda d: len(next(csv.reader([first], delimiter=d), [])))
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = [cell.strip() for cell in next(reader, [])]
        rows = []
        for row in filter(None, reader):
            if len(row) != len(header):
                raise ParameterError(
                    f"{name} line {reader.line_num} has {len(row)} cells, but the header has {len(header)}; "
                    "mend the line (a cell that contains the delimiter needs quotes)"
                )
            rows.append(row)
    except csv.Error as error:
        raise ParameterError(f"{name} is not readable as CSV near line {reader.line_num}: {error}") from error
    if not rows:
        raise ParameterError(f"{name} has no rows; expected a header line and at least one row")
    stripped = ([cell.strip() for cell in column] for column in zip(*rows, strict=True))
    columns = (["" if cell in ABSENT else cell for cell in column] for column in stripped)
    return header, dict(zip(header, columns, strict=True))


def is_table(source: str) -> bool:
    """Whether a source names a file that `read_table` reads, by its ending."""
    return source.endswith((".csv", ".csv.gz"))


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed if its name ends in .gz. Raises ParameterError if it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.endswith(".gz") else data
    except FileNotFoundError:
        raise ParameterError(f"there is no file {path}; a relative path starts at the run file's folder") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ParameterError(f"{path} cannot be read: {error}; get the file again") from error


def _refuse_absent(path: Path, columns: dict[str, list[str]], target: str | None, id_column: str | None) -> None:
    lacking = {name: count for name, column in columns.items() if (count := column.count(""))}
    if not lacking:
        return
    rows = len(next(iter(columns.values())))
    listed = ", ".join(f"column {name!r} in {count} of {rows} rows" for name, count in lacking.items())
    if target in lacking:
        remedy = "remove those rows, a target cannot be filled in"
    elif id_column in lacking:
        remedy = "give every row its id"
    else:
        remedy = 'fill them in, or set missing = "median" or "indicator"'
    raise ParameterError(f"{path.name} lacks values: {listed}; {remedy}")


def numbers_of(column: list[str]) -> NDArray[np.float64] | None:
    """The cells as numbers, NaN where empty; None if any cell is something else."""
    try:
        numbers = [float(cell) if cell else np.nan for cell in column]
    except ValueError:
        return None
    # Python reads 1_000 as a number and "nan" in any case as one: in a table these are strings
    if any("_" in cell for cell in column) or sum(map(np.isnan, numbers)) != column.count(""):
        return None
    return np.array(numbers, np.float64)


def _encode(name: str, column: list[str], encoding: Encoding, path: Path) -> tuple[NDArray[np.float32], list[str]]:
    """One column as float32[n, 1 or more], and the names of what it became."""
    numbers = numbers_of(column)
    if numbers is not None:
        with np.errstate(over="ignore"):  # too large becomes infinite, which the construction of `Dataset` refuses
            return numbers.astype(np.float32)[:, None], [name]
    categories, codes = np.unique([cell or ABSENT_CATEGORY for cell in column], return_inverse=True)
    if encoding == "ordinal":
        return codes.astype(np.float32)[:, None], [name]
    if len(categories) > MOST_CATEGORIES:
        raise ParameterError(
            f"{path.name}: column {name!r} has {len(categories)} different strings, such as {str(categories[0])!r}, "
            f'too many for one-hot columns (at most {MOST_CATEGORIES}); remove it, or set encoding = "ordinal"'
        )
    return np.eye(len(categories), dtype=np.float32)[codes], [f"{name}={c}" for c in categories]


def targets_of(column: list[str], name: str, task: Task | None, path: Path) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Integers and strings as classes in sorted order (unless regression), other numbers as they are."""
    numbers = numbers_of(column)
    if numbers is None:
        if task == "regression":
            wrong = next(cell for cell in column if numbers_of([cell]) is None)
            raise ParameterError(f"{path.name}: regression needs numbers, but the target {name!r} holds {wrong!r}")
        categories, codes = np.unique(column, return_inverse=True)
        if len(categories) < 2:
            raise ParameterError(f"{path.name}: the target {name!r} is always {column[0]!r}; expected two classes")
        return codes.astype(np.int64), tuple(str(c) for c in categories)
    if not np.isfinite(numbers).all():
        raise ParameterError(f"{path.name}: the target {name!r} is infinite in some rows; remove or mend them")
    whole = task == "classification" or not any(mark in cell for cell in column for mark in ".eEnN")
    if task == "regression" or not whole or (numbers != np.round(numbers)).any():
        return numbers, ()
    values, codes = np.unique(numbers, return_inverse=True)
    if len(values) < 2:
        raise ParameterError(f"{path.name}: the target {name!r} is always {values[0]:g}; expected two classes")
    return codes.astype(np.int64), tuple(str(int(v)) for v in values)
