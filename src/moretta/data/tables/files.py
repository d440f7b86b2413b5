"""Files of tables as columns: CSV, Parquet and Arrow, read by pyarrow.

numbers   float64[rows], NaN where a cell is absent
dates     datetime64[D][rows], NaT where absent
words     str[rows], empty where absent

**Formulas.** A spreadsheet computes a cell such as ``=HYPERLINK(...)``. `written` puts a single quote before it and
double quotes around it, as OWASP's page "CSV Injection" advises. Where a decimal comma is usual, a spreadsheet
separates cells by semicolons, and respects only quotes after one. So a formula after a separator, a quote or a line end
within a cell gets a single quote too. Numbers stay unchanged.

    >>> escaped("=1+1"), escaped("-0.5"), escaped("'=1+1"), unescaped(escaped("=1+1"))
    ("'=1+1", '-0.5', "''=1+1", '=1+1')
    >>> escaped("a;=1+1"), unescaped(escaped("a;=1+1"))
    ("a;'=1+1", 'a;=1+1')
"""

import codecs
import csv
import gzip
import io
import os
import re
import struct
import unicodedata
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moretta.contract.memory import check_memory, free_memory, within_memory
from moretta.data.tables.arrow_files import decoded_size, read_arrow, read_parquet
from moretta.errors import MissingExtra, ParameterError

ABSENT = ("", "NA", "NaN", "nan", "?")
ENDINGS = (".csv", ".csv.gz", ".parquet", ".arrow", ".feather")
LINES_TRIED = 20
EXACT = 2.0**53  # beyond it a float rounds integers: they are ids, and stay words
UNNAMED = "Unnamed: 0"  # pandas' name for a first column of row numbers without a name
CELL_BYTES = 72  # of a word in memory: Python's object and its reference
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_NUMBER = f"^{NUMBER}$"
DATE_LIKE = re.compile(r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T]\d{1,2}:\d{2}.*)?$")
# The possible begin of a cell, our quotes, and then the begin of a formula, also of East Asian width.
_FORMULA = re.compile(r"((?:^|[;\t|\"\r\n])[ \ufeff]*)('*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")

_WHOLE = re.compile(r"^([+-]?[0-9]+)[.,]00?$")  # three zeros may stand behind a mark between thousands
_BLANKS = re.compile(r'("[^"]*")|[ \t]+')
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # the start of such a file, and of no file in UTF-8
_WINDOWS = re.compile(rb"[\x80-\x9f]")  # signs there, and no text in latin-1

Column = NDArray[Any]
Separator = Literal[",", ";", "\t", "|", " "]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Format:
    """The form of a CSV file; other kinds of file use only `absent`.

    Args:
        separator: None detects ',', ';' or a tab; ' ' is one or more spaces.
        decimal: the sign before a number's fraction.
        encoding: of the text, such as "latin-1".
        absent: cells that hold no value, in capitals or not, besides `ABSENT`; -9 also stands for -9.0.
    """

    separator: Separator | None = None
    decimal: Literal[".", ","] = "."
    encoding: str = "utf-8"
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.separator not in (None, *get_args(Separator)):
            raise ParameterError(f"separator = {self.separator!r}: expected a comma, ;, |, a tab or a blank")
        if self.decimal not in (".", ","):
            raise ParameterError(f"decimal = {self.decimal!r}: expected . or ,")

    @cached_property
    def _absent(self) -> frozenset[str]:
        return frozenset(map(self._plain, self.absent))

    def _plain(self, word: str) -> str:
        """Return a word in small letters, and a number without the zeros at the end of its fraction."""
        mark = re.escape(self.decimal)
        return re.sub(rf"^([+-]?[0-9]+)(?:{mark}0*|({mark}[0-9]*[1-9])0+)$", r"\1\2", word).lower()

    def is_absent(self, word: str) -> bool:
        """Return whether a word stands for no value."""
        return word in ABSENT or bool(self.absent and self._plain(word) in self._absent)

    def present(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return numbers, NaN where they stand for no value, also where they were float32."""
        if not self._absent:
            return numbers
        words = [word.replace(self.decimal, ".") for word in self._absent]
        none = [float(word) for word in words if re.match(_NUMBER, word)]
        return without(numbers, none)


def without(numbers: NDArray[np.float64], none: Sequence[float]) -> NDArray[np.float64]:
    """Return numbers, NaN where they are among others, also where they were float32."""
    with np.errstate(over="ignore"):
        return np.where(np.isin(numbers, [*none, *np.array(none, np.float32).tolist()]), np.nan, numbers)


def is_table(source: str) -> bool:
    """Return whether a source names a file that `read_columns` reads, by its ending."""
    return source.endswith(ENDINGS)


def read_columns(path: Path, form: Format | None = None, leave_out: Collection[str] = ()) -> dict[str, Column]:
    """Return a file's columns by name, in the file's order; numbers of a CSV file are still words (`as_numbers`).

    Args:
        leave_out: Columns whose cells are not read, and become empty words.

    Raises:
        ParameterError: The file is unreadable; the sentence names it and the line or the column.
        MissingExtra: pyarrow is not installed.
    """
    with within_memory(f"{path}"):
        return _columns(path, form or Format(), leave_out)


def _columns(path: Path, form: Format, leave_out: Collection[str]) -> dict[str, Column]:
    if not is_table(path.name):
        raise ParameterError(
            f"{path.name}: expected a table, a file that ends in {', '.join(ENDINGS)}; save it as CSV, or rename it to "
            ".csv if commas, blanks or the like separate its cells"
        )
    content, is_csv = read_bytes(path), path.name.endswith((".csv", ".csv.gz"))
    table = _csv(content, path, form, leave_out) if is_csv else _arrow(content, path)
    if not table.num_rows:
        raise ParameterError(f"{path.name} has no rows; expected column names and at least one row")
    check_names(list(table.column_names), path.name)
    kept = [name for name in table.column_names if name not in leave_out]
    size = sum(decoded_size(table.column(name)) for name in kept) + table.num_rows * len(kept) * CELL_BYTES
    check_memory(size, f"{path} takes")
    columns = {
        name: np.full(table.num_rows, "", object)
        if name in leave_out
        else _column(table.column(name), name, path.name, form)
        for name in table.column_names
    }
    if is_csv and is_predicted(table.column_names):  # by `written`
        return {unescaped(name): np.array([*map(unescaped, cells)], object) for name, cells in columns.items()}
    return columns


def check_order(columns: Mapping[str, Any], where: str) -> None:
    """Raise ParameterError if columns of pandas are in different orders, by their indices.

    Args:
        columns: Columns of the same rows, by the names of arguments. A mapping is a column for each of its keys.
        where: The start of the error's sentence.
    """
    flat = dict[str, Any]()
    for name, value in columns.items():
        several = isinstance(value, Mapping)
        flat |= {f"{name}[{key!r}]": part for key, part in value.items()} if several else {name: value}
    indexed = [(name, part) for name, part in flat.items() if hasattr(getattr(part, "index", None), "equals")]
    for (first, own), (name, part) in pairwise(indexed):
        if len(part) == len(own) and not own.index.equals(part.index):
            raise ParameterError(
                f"{where}: the indices of {first} and {name} differ; expected the same row order: reorder one of "
                f"them, or pass {name}.to_numpy() if the rows already match"
            )


def composed(names: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return ids or groups as they are compared: in Unicode's form NFC, and 17.0, as pandas writes floats, as 17."""
    if names is None or names.dtype.kind != "U":
        return names
    return np.array([_WHOLE.sub(r"\1", unicodedata.normalize("NFC", name)) for name in names.tolist()], np.str_)


def is_frame(rows: object) -> bool:
    """Return whether rows are columns by name."""
    return hasattr(rows, "columns") and (hasattr(rows, "to_numpy") or hasattr(rows, "column_names"))


def column_names(frame: Any) -> Sequence[Any]:
    """Return the names of a frame's columns, of pandas or polars, or of a table of pyarrow."""
    return list(frame.columns if hasattr(frame, "to_numpy") else frame.column_names)


def as_columns(
    frame: Any, where: str, form: Format | None = None, leave_out: Collection[str] = ()
) -> dict[str, Column]:
    """Return the columns of a frame or a mapping, by name, in the form of a file's.

    Args:
        frame: A frame of pandas, polars or pyarrow, or a mapping of columns.
        where: The start of each error's sentence.
        leave_out: Columns that are left out.

    Raises:
        ParameterError: Columns have unequal lengths, or values other than numbers, words and dates.
    """
    names = list(frame if isinstance(frame, Mapping) else column_names(frame))
    check_order({"columns": frame}, where)
    check_names([str(name) for name in names], where)
    kept = [name for name in names if name not in leave_out]
    columns = {str(name): _of_frame(frame[name], f"{where}: column {str(name)!r}", form or Format()) for name in kept}
    counts = {name: len(column) for name, column in columns.items()}
    if not counts or len(set(counts.values())) > 1 or not max(counts.values()):
        raise ParameterError(f"{where}: expected columns of equal length, at least one row; got {len(counts)} columns")
    return columns


def _of_frame(column: Any, where: str, form: Format) -> Column:
    check_dense(column, where, "x")
    zones = (getattr(getattr(column, of, None), key, None) for of in ("type", "dtype") for key in ("tz", "time_zone"))
    if zone := next(filter(None, zones), None):  # NumPy has none: a day's first hours would be the day before
        raise ParameterError(f"{where}: got times of the zone {zone}; expected days: give dates, or times without zone")
    values = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if values.ndim != 1 or (values.dtype.kind == "O" and any(isinstance(cell, np.ndarray | list) for cell in values)):
        raise ParameterError(f"{where}: expected one number, word or date a row; got several")
    if values.dtype.kind == "b":
        return np.where(values, "true", "false").astype(object)
    if values.dtype.kind in "iuf":
        if values.dtype.kind == "f" or not len(values) or np.abs(values.astype(np.float64)).max() <= EXACT:
            return form.present(values.astype(np.float64))
        values = values.astype(str).astype(object)
    if values.dtype.kind == "M":
        return values.astype("datetime64[D]")
    if values.dtype.kind not in "OUT":
        raise ParameterError(f"{where}: expected numbers, words or dates, one a row; got {values.dtype}")
    cells = ["" if _is_absent(cell) else cell for cell in values.tolist()]
    numbers = [cell for cell in cells if isinstance(cell, int | float) and not isinstance(cell, bool)]
    exact = not any(isinstance(number, int) and abs(number) > EXACT for number in numbers)
    if exact and len(numbers) == sum(cell != "" for cell in cells):
        return form.present(np.array([np.nan if cell == "" else float(cell) for cell in cells]))
    words = [str(cell).lower() if isinstance(cell, bool) else str(cell).strip() for cell in cells]
    return np.array(["" if form.is_absent(word) else word for word in words], object)


def _is_absent(cell: Any) -> bool:
    """Return whether a cell of a frame is `None`, NaN or pandas' NA, which is neither equal to itself nor different."""
    try:
        return cell is None or bool(cell != cell)
    except TypeError:
        return True


def read_bytes(path: Path) -> bytes:
    """Return a file's content, decompressed if its name ends in .gz. Raises `ParameterError` if unreadable."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            check_memory(2 * size, f"{path} takes")
            return _unpacked(stream, path) if path.name.endswith(".gz") else stream.read()
    except FileNotFoundError:
        raise ParameterError(
            f"there is no file {path}; check the path, which in a run file starts at its folder"
        ) from None
    except PermissionError:
        raise ParameterError(
            f"you have no permission to read {path}; ask its owner for it, or read a copy of your own"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ParameterError(f"{path} cannot be read: {error}; get the file again") from error


def _unpacked(stream: BinaryIO, path: Path) -> bytes:
    """Decompress a file, and stop before it takes more memory than is free."""
    parts, size, most = list[bytes](), 0, free_memory() // 2  # the parts, and the whole made of them
    with gzip.GzipFile(fileobj=stream) as unpacked:
        while part := unpacked.read(1 << 20):
            parts.append(part)
            size += len(part)
            if size > most:
                raise MemoryError
    return b"".join(parts)


def as_numbers(words: Column, decimal: str = ".") -> NDArray[np.float64] | None:
    """Return words as numbers, NaN where empty; None if some word is not a number, such as "1_000" and "inf"."""
    compute, arrow = _pyarrow("compute"), _pyarrow()
    cells = arrow.array(words, arrow.string())
    if decimal != ".":
        if compute.any(compute.match_substring(cells, ".")).as_py():
            return None
        cells = compute.replace_substring(cells, decimal, ".")
    there = compute.not_equal(cells, "")
    if not compute.all(compute.or_(compute.invert(there), compute.match_substring_regex(cells, _NUMBER))).as_py():
        return None
    cells = compute.if_else(there, compute.utf8_ltrim(cells, "+"), arrow.scalar(None, arrow.string()))
    numbers: NDArray[np.float64] = compute.cast(cells, arrow.float64()).to_numpy(zero_copy_only=False)
    return numbers


def are_numbers(words: Column, decimal: str = ".") -> NDArray[np.bool_]:
    """Return which words are numbers, bool[rows]."""
    compute, arrow = _pyarrow("compute"), _pyarrow()
    cells = compute.replace_substring(arrow.array(words, arrow.string()), decimal, ".")
    matches: NDArray[np.bool_] = compute.match_substring_regex(cells, _NUMBER).to_numpy(zero_copy_only=False)
    return matches


def check_names(names: list[str], file: str) -> None:
    """Raise ParameterError for a header that is a row, or has a repeated or empty name, never quoted."""
    if any(re.match(_NUMBER, name) or DATE_LIKE.match(name) for name in names):
        raise ParameterError(
            f"{file}: the first line holds numbers, expected names of columns; add a header line with {len(names)} "
            "names, or rename the columns whose names are numbers"
        )
    first = {name: place for place, name in reversed(list(enumerate(names, 1)))}
    twice = [place for place, name in enumerate(names, 1) if name and first[name] < place]
    if "" in names or twice:
        place = twice[0] if twice else names.index("") + 1
        what = f"has the name of column {place} of {len(names)} twice" if twice else f"has no name for column {place}"
        raise ParameterError(
            f"{file}: the first line {what}; expected a header line with a name for each column: add one, or correct "
            "the names"
        )


def _pyarrow(part: str = "") -> ModuleType:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("reading tables needs pyarrow; run: pip install 'moretta[tables]'") from error
    module: ModuleType = getattr(pyarrow, part) if part else pyarrow
    return module


def _csv(content: bytes, path: Path, form: Format, leave_out: Collection[str]) -> Any:
    reader, arrow, name = _pyarrow("csv"), _pyarrow(), path.name
    check_memory((3 if content.isascii() else 6) * len(content), f"{path} takes")  # text, its bytes, the table
    text = _decoded(content, name, form.encoding)
    if form.separator == " ":
        text = _BLANKS.sub(lambda match: match[1] or " ", re.sub(r"(?m)^[ \t]+|[ \t]+(?=\r?$)", "", text))
    header, separator = _header(text, name, form.separator)
    check_names(header, name)
    cells = (text.count("\n") + text.count(separator)) / len(header) * len(set(header) - set(leave_out))
    check_memory(2 * len(content) + cells * CELL_BYTES, f"{path} takes")
    _check_quotes(text, name, separator)
    alone = len(header) == 1  # so an empty line is a row without a value
    short: list[tuple[int, int]] = []

    def uneven(row: Any) -> str:
        short.append((row.number, row.actual_columns))
        return "skip"

    try:
        table = reader.read_csv(
            io.BytesIO((text.rstrip("\r\n") if alone else text).encode()),
            read_options=reader.ReadOptions(use_threads=False, column_names=header, skip_rows_after_names=1),
            parse_options=reader.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=uneven, ignore_empty_lines=not alone
            ),
            convert_options=reader.ConvertOptions(column_types=dict.fromkeys(header, arrow.string())),
        )
    except arrow.ArrowInvalid as error:
        raise ParameterError(f"{name} is not readable as CSV; save it again, as a table in UTF-8") from error
    if short:
        number, cells = short[0]
        if not table.num_rows and {count for _, count in short} == {len(header) + 1}:
            raise ParameterError(
                f"{name}: each line has {cells} cells, but the first {len(header)}; name the first column too, such "
                'as "row"'
            )
        raise ParameterError(
            f"{name} line {number} has {cells} cells, but the header has {len(header)}; fix the line (a cell that "
            "contains the separator needs quotes)"
        )
    return table


def _check_quotes(text: str, name: str, separator: str) -> None:
    """Raise for a quoted cell that ends in the middle of another line, or never: whole rows would be its text."""
    ends = re.escape(separator) + r"\r\n"
    for cell in re.finditer(rf'(?:\A|(?<=[{ends}]))"([^"]*(?:""[^"]*)*)("|\Z)([^{ends}]?)', text):
        inside, closed, behind = cell.groups()
        if not closed or (behind and ("\n" in inside or "\r" in inside)):
            line = text.count("\n", 0, cell.start()) + 1
            raise ParameterError(
                f"{name} line {line} has a quote that no other closes at the end of its cell; close the cell, and "
                'write a quote inside of it twice, as in "5"" long"'
            )


def _decoded(content: bytes, name: str, encoding: str) -> str:
    encoding = "utf-16" if content.startswith(_UTF_16) else encoding
    try:
        text = content.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
        text.encode()  # some codecs make halves of characters
        if "\0" in text and encoding != "utf-16":
            likely = "utf-16-be" if content.startswith(b"\0") else "utf-16-le"
            raise ParameterError(f'{name} is not {encoding} text; set its encoding, such as file-encoding = "{likely}"')
        return text
    except UnicodeDecodeError as error:
        likely = "cp1252" if _WINDOWS.search(content) and encoding != "cp1252" else "latin-1"
        raise ParameterError(
            f"{name} is not {encoding} text (byte {error.start}); set its encoding, for example "
            f'file-encoding = "{likely}", or save it in UTF-8'
        ) from None
    except (LookupError, ValueError):  # an unknown codec, one that is not for texts, or one that fails on this file
        raise ParameterError(
            f'{name}: file-encoding = "{encoding:.40}" reads no text in it; expected for example "latin-1"'
        ) from None


def _header(text: str, name: str, separator_set: str | None) -> tuple[list[str], str]:
    """Return the names of the first line, and their separator."""
    lines = [line[0] for line in islice(re.finditer(r"[^\r\n]*(\r\n?|\n)|[^\r\n]+", text), LINES_TRIED)]
    if not lines or not lines[0].strip("\r\n"):
        raise ParameterError(f"{name} has no rows; expected column names and at least one row")
    separator = separator_set or max(",;\t", key=lambda mark: len(next(csv.reader(lines, delimiter=mark), [])))
    header = [cell.strip() for cell in next(csv.reader(lines, delimiter=separator), [])]
    if any(mark in cell for cell in header for mark in "\r\n"):
        raise ParameterError(
            f"{name}: the first line has a name with a line break; expected each name in one line: write a blank "
            "instead, or close its quotes"
        )
    if separator_set is None and len(header) == 1:  # one column shows no separator
        for other in "| ":
            counts = {len(line.split(None if other == " " else other)) for line in lines}
            if len(counts) == 1 and counts != {1}:
                raise ParameterError(
                    f'{name}: the first line is one cell; expected a header line of several, so "{other}" may be '
                    f'between the cells: set separator = "{other}" ([data] of a run file) or --separator "{other}"'
                )
    if not header[0] and all(re.match(rf'"?[0-9]+"?{re.escape(separator)}', line) for line in lines[1:]):
        header[0] = UNNAMED
    return header, separator


def _arrow(content: bytes, path: Path) -> Any:
    arrow, kind = _pyarrow(), path.suffix.removeprefix(".")
    try:
        if kind == "parquet":
            check_names(list(_pyarrow("parquet").read_schema(arrow.BufferReader(content)).names), path.name)
            table = read_parquet(content, path)
        else:
            table = read_arrow(content, path)
        table.validate(full=True)  # pyarrow follows a file's offsets, also out of the file's own memory
        return table
    except (arrow.ArrowException, OSError, struct.error, UnicodeDecodeError) as error:
        if isinstance(error, MemoryError):
            raise
        reason = str(error).partition("\n")[0]
        raise ParameterError(f"{path.name} is not readable as {kind}: {reason:.120}") from None


def _column(chunks: Any, name: str, file: str, form: Format) -> Column:
    arrow, compute = _pyarrow(), _pyarrow("compute")
    kind, types = chunks.type, arrow.types
    if types.is_dictionary(kind):
        kind = arrow.large_string() if types.is_string(kind.value_type) else kind.value_type
        chunks = chunks.cast(kind)
    if types.is_boolean(kind):
        chunks, kind = compute.if_else(chunks, "true", "false"), arrow.string()
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        numbers = np.array(chunks.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
        if not (types.is_integer(kind) and (np.abs(numbers) > EXACT).any()):
            return form.present(numbers)
        chunks, kind = chunks.cast(arrow.string()), arrow.string()
    if types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind):
        text = arrow.large_string()  # a column may be longer than 2 GiB
        cells = compute.utf8_trim_whitespace(compute.fill_null(chunks.cast(text), ""))
        words = cells.to_numpy(zero_copy_only=False).astype(object)
        none = [word for word in compute.unique(cells).to_pylist() if form.is_absent(word)] if form.absent else ABSENT
        words[compute.is_in(cells, value_set=arrow.array(none, text)).to_numpy(zero_copy_only=False)] = ""
        return np.asarray(words)
    if types.is_timestamp(kind) and kind.tz:
        chunks = compute.local_timestamp(chunks)  # the local day, as in words of a CSV file
    if types.is_date(kind) or types.is_timestamp(kind):
        days = chunks.cast(arrow.timestamp("us"), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(days).astype("datetime64[D]")
    raise ParameterError(
        f"{file}: column {name!r} has the type {kind}; expected numbers, words, dates, true or false: change or "
        "remove it"
    )


def check_dense(value: object, where: str, name: str = "") -> None:
    """Refuse a sparse matrix or a masked array, which would pass for a plain array."""
    if is_sparse(value):
        raise ParameterError(f"{where}: got a sparse matrix; expected a dense array: pass {name}.toarray()")
    rows = value if isinstance(value, list | tuple) else ()
    if np.ma.isMaskedArray(value) or any(map(np.ma.isMaskedArray, rows)):  # plain, they have the values under the mask
        what = "masked arrays in a list" if rows else "a masked array"
        remedy = "leave out the rows whose target is masked" if name == "y" else "fill in the masked values"
        example = "" if name == "y" or rows else f", as {name}.astype(float).filled(nan)"
        raise ParameterError(f"{where}: got {what}; {remedy}{example}")


def is_sparse(value: object) -> bool:
    """Return whether this is a sparse matrix of SciPy."""
    return hasattr(value, "toarray")


def written(header: Sequence[str], columns: Sequence[Sequence[str] | Sequence[float]]) -> bytes:
    """Return a CSV file of columns of equal length, with a header."""
    rows = [header, *zip(*columns, strict=True)]
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows).encode()


def escaped(cell: str) -> str:
    """Return a cell that no spreadsheet computes; further quotes before a formula stay distinct from ours."""
    return cell if re.fullmatch(NUMBER, cell) else _FORMULA.sub(r"\1'\2", cell)


def unescaped(cell: str) -> str:
    """Undo `escaped`."""
    plain = _FORMULA.sub(lambda match: match[1] + match[2][1:], cell)
    return plain if escaped(plain) == cell else cell


def is_predicted(names: Sequence[str]) -> bool:
    """Return whether columns have the names of `moretta.run.prediction`'s, perhaps after an id."""
    return _is_predicted(names) or _is_predicted(names[1:])


def _is_predicted(names: Sequence[str]) -> bool:
    if names[:1] == ["prediction"]:
        return all(name.startswith("probability_") for name in names[1:])
    return bool(names) and list(names) == [f"prediction_{k}" for k in range(len(names))]


def _cell(value: str | float) -> str:
    if not isinstance(value, str):
        return repr(float(value))
    text = escaped(value)
    quoted = text != value or not text or re.search(r'[",\r\n]', text)
    return '"' + text.replace('"', '""') + '"' if quoted else text
