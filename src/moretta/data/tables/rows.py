"""A table's columns as rows of numbers, by its schema.

    coded     float32[rows, features]   a number, days, or a category's place in the schema; NaN where absent
    expanded  float32[rows, inputs]     categories as columns of zeros and ones, marks of absent values (`Expansion`)

Errors name the column, how many rows are wrong and the first line; they never quote a cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.contract.wording import kind_of, names_keywords, nearest
from moretta.data.tables.files import (
    Column,
    Columns,
    Format,
    Separator,
    are_numbers,
    as_columns,
    as_numbers,
    composed,
    is_frame,
    read_columns,
    without,
)
from moretta.data.tables.preparation import MARK, ONE_OF, PLAIN, ColumnRules, Expansion, check_rounding
from moretta.data.tables.schema import Category, Date, Feature, Number, Ordered, Schema, Target
from moretta.errors import ParameterError

ABSENT_CATEGORY = "missing"
FILLS = {"refuse": 0, "mean": 1, "median": 2, "indicator": 1}  # places in `moretta.data.tables.preparation.Fill`
_EPOCH = date(1970, 1, 1).toordinal()
CENSORED = re.compile(r"^[<>]=?\s*(?=[+-]?[0-9.])")


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of one file: coded inputs, the same expanded (x) or images, targets, ids and groups.

    Attributes:
        y: int64[rows], a class's place in the schema, or float64[rows]; empty without targets.
        ids, groups: str[rows].
        left_out: The reason for each row of the file that is left out, by its number from 1.
    """

    coded: NDArray[np.float32]
    x: Array
    y: NDArray[Any]
    ids: NDArray[np.str_] | None
    groups: NDArray[np.str_] | None
    left_out: Mapping[int, str] = field(default_factory=dict)

    def __getitem__(self, places: Any) -> TableRows:
        """Return some of the rows, by their numbers or by true and false: `rows[train]`."""
        ids, groups = (None if values is None else values[places] for values in (self.ids, self.groups))
        return TableRows(self.coded[places], self.x[places], self.y[places] if len(self.y) else self.y, ids, groups)


@names_keywords()
def read_table(
    table: Any,
    schema: Schema,
    form: Format | None = None,
    *,
    labelled: bool = True,
    separator: Separator | None = None,
    decimal: Literal[".", ","] = ".",
    encoding: str = "utf-8",
    absent: Sequence[str] = (),
) -> TableRows:
    """Read a table by its schema, for example for `Silo(name, rows.x, rows.y, groups=rows.groups)`.

    Args:
        table: The path of a file, a frame of pandas or polars, or a mapping of columns by name.
        schema: What the columns mean.
        form: `separator`, `decimal`, `encoding` and `absent` in one value, instead of these.
        labelled: Whether the table has targets.
        separator: Between the cells of a .csv file: , ; | tab or blank. None detects the first two and a tab.
        decimal: Before a number's fraction, "." or ",".
        encoding: Of the text, such as "latin-1".
        absent: Words that stand for no value; -9 also stands for -9.0. Give a `Federation` the same, for rows to
            predict.

    Returns:
        TableRows: Coded inputs, x [rows, inputs] after expansion, y, ids, groups, and the rows that were left out.

    Raises:
        ParameterError: A column or a cell does not fit the schema; the sentence names it.
    """
    written = Format(separator, decimal, encoding, (absent,) if isinstance(absent, str) else tuple(absent))
    if form is not None and written != Format():
        raise ParameterError("read_table: form excludes separator, decimal, encoding and absent; pass form or these")
    form = form or written
    if not isinstance(schema, Schema):
        raise ParameterError(
            'read_table: schema: expected a Schema, such as Schema(columns={"age": Number()}), or one read by '
            f"moretta.data.tables.schema.load(path); got {kind_of(schema)}"
        )
    if not isinstance(table, str | Path):
        if not isinstance(table, Mapping) and not is_frame(table):
            raise ParameterError(
                f"read_table: expected the path of a file, a frame or a mapping of columns; got {kind_of(table)}"
            )
        return encode(
            as_columns(table, "the table", form, schema.dropped), schema, "the table", form, labelled=labelled
        )
    path = Path(table)
    return encode(read_columns(path, form, schema.dropped), schema, path.name, form, labelled=labelled)


def encode(
    columns: Columns,
    schema: Schema,
    where: str,
    form: Format | None = None,
    *,
    labelled: bool = True,
    training: bool = True,
    leave_out: bool = False,
) -> TableRows:
    """Return a file's rows by the schema.

    Args:
        where: the file or site, which begins the sentence of an error.
        labelled: whether the file must have targets.
        training: whether to refuse columns that the schema does not name; rows to predict may have them, and may lack
            the target.
        leave_out: whether to leave out rows with a cell that does not fit the schema, as long as others remain.

    Raises:
        moretta.errors.ParameterError: columns or cells do not fit the schema.
    """
    form = form or Format()
    _check_columns(columns, schema, where, labelled=labelled, training=training)
    count = len(next(iter(columns.values())))
    if leave_out and (wrong := _wrong(columns, schema, where, form)):
        kept = np.setdiff1d(np.arange(count), [row - 1 for row in wrong])
        fitting = {name: column[kept] for name, column in columns.items()}
        return replace(encode(fitting, schema, where, form, labelled=labelled, training=training), left_out=wrong)
    coded = np.empty((count, len(schema.features)), np.float32)
    for number, (name, feature) in enumerate(schema.features.items()):
        values = _Reader(where, name, columns[name], form).coded(feature)
        if training:
            check_rounding(values, f"{where}: column {name!r}")
        coded[:, number] = values
    y: NDArray[Any] = np.empty(0)
    if labelled and schema.target is not None and schema.target.mask_values is None:
        named = schema.name_of("target") or ""
        y = _Reader(where, named, columns[named], form).targets(schema.target)
        if training:
            check_rounding(y, f"{where}: column {named!r}")
    ids, groups = (_names(columns, schema.name_of(kind), where, form) for kind in ("id", "group"))
    ids, groups = (composed(ids), composed(groups)) if training else (ids, groups)  # predictions have the file's
    if ids is not None and training and len(np.unique(ids)) < len(ids):
        twice = len(ids) - len(np.unique(ids))
        raise ParameterError(
            f"{where}: column {schema.name_of('id')!r} has {twice} rows whose id is repeated; expected an id of its "
            'own for each row: correct the ids, or set kind = "group" where rows are visits of the same patient'
        )
    return TableRows(coded, expansion_of(schema).apply(coded), y, ids, groups)


def _wrong(columns: Columns, schema: Schema, where: str, form: Format) -> dict[int, str]:
    """Return the rows, from 1, with a cell that does not fit the schema, and why. Raises if all have one."""
    count, reasons = len(next(iter(columns.values()))), dict[int, str]()
    ids = [name for name in (schema.name_of("id"), schema.name_of("group")) if name is not None and name in columns]
    for name in (*schema.features, *ids):
        rows = np.arange(count)
        while len(rows):
            try:
                if name in schema.features:
                    _Reader(where, name, columns[name][rows], form).coded(schema.features[name])
                else:
                    _names({name: columns[name][rows]}, name, where, form)
                break
            except WrongRows as error:
                reasons |= {int(row) + 1: error.what for row in rows[error.wrong] if int(row) + 1 not in reasons}
                if len(reasons) == count:  # the form of the whole file differs
                    raise
                rows = rows[~error.wrong]
    return dict(sorted(reasons.items()))


def expansion_of(schema: Schema) -> Expansion:
    """Return how coded rows become a model's inputs."""
    inputs = list[tuple[str, int, int, int]]()  # a name, its coded column, a kind and a code
    for place, (name, feature) in enumerate(schema.features.items()):
        if isinstance(feature, Category):
            inputs += [(f"{name}={word}", place, ONE_OF, code) for code, word in enumerate(feature.categories)]
        else:
            inputs.append((name, place, PLAIN, 0))
        if feature.blanks in ("category", "indicator"):
            inputs.append((f"{name}={ABSENT_CATEGORY}", place, MARK, 0))
    names = tuple(name for name, *_ in inputs)
    source, kinds, codes = (np.array([entry[place] for entry in inputs], np.float64) for place in (1, 2, 3))
    return Expansion(tuple(schema.features), names, source.astype(np.int64), kinds.astype(np.int8), codes)


def rules_of(schema: Schema) -> ColumnRules:
    """Return the filling of absent values, by expanded column; none is scaled."""
    expansion, features = expansion_of(schema), list(schema.features.values())
    count = len(expansion.names)
    fills, low, high = np.zeros(count, np.int8), np.zeros(count), np.zeros(count)
    for column in np.flatnonzero(expansion.kinds == PLAIN):
        feature = features[expansion.source[column]]
        fills[column] = FILLS[feature.blanks]
        if feature.blanks == "median":
            low[column], high[column] = limits_of(feature)
    return ColumnRules(np.zeros(count, np.bool_), fills, low, high)


def words_of(column: Column) -> Column:
    """Return a column as words, empty where absent: whole numbers without a fraction, others in the fewest digits."""
    if column.dtype.kind in "OU":
        return column
    if column.dtype.kind == "M":
        return np.array(["" if np.isnat(day) else str(day) for day in column], object)
    numbers = map(float, column)
    return np.array(["" if n != n else str(int(n)) if n.is_integer() else _fraction(n) for n in numbers], object)


def _fraction(number: float) -> str:
    return str(short) if (short := np.float32(number)) == number else repr(number)  # 0.1 that was float32


class WrongRows(ParameterError):
    """Some rows of a column do not fit the schema.

    Attributes:
        wrong: Whether a row is wrong, bool[rows].
        what: The wrong content, in words.
    """

    def __init__(self, sentence: str, wrong: NDArray[np.bool_], what: str) -> None:
        super().__init__(sentence)
        self.wrong, self.what = wrong, what


def refuse(wrong: NDArray[np.bool_], what: str, remedy: str, where: str = "") -> None:
    """Raise `WrongRows` if a row is wrong.

    Args:
        wrong, what: As in `WrongRows`.
        where: The start of the sentence.
    """
    if wrong.any():
        rows = f"{int(wrong.sum())} of {len(wrong)} rows (the first is row {int(np.argmax(wrong)) + 1})"
        raise WrongRows(f"{where}{what} in {rows}; {remedy}", wrong, what)


class _Reader:
    """One column of one file. where, name: of the file and the column."""

    def __init__(self, where: str, name: str, column: Column, form: Format) -> None:
        self._where, self._name, self._column, self._form = where, name, column, form

    def coded(self, feature: Feature) -> NDArray[np.float64]:
        """Return an input column, NaN where absent."""
        match feature:
            case Number():
                values = self._within(self._numbers(feature), feature.range)
            case Date():
                values = self._days(feature)
            case Category() | Ordered():
                unseen = feature.unseen == "blank"
                values = self._places(feature.categories, feature.spellings, unseen_is_blank=unseen)
        if feature.blanks == "refuse":
            self.refuse(
                np.isnan(values),
                "no value",
                'fill them in, or set blanks in the schema, for example blanks = "mean"'
                if not isinstance(feature, Category)
                else 'fill them in, or set blanks = "category" in the schema',
            )
        return values

    def targets(self, target: Target) -> NDArray[Any]:
        """Return the targets; none may be absent."""
        if target.classes:
            values = self._places(target.classes, target.spellings)
        else:
            values = self._within(self._numbers(Number()), target.range)
        self.refuse(np.isnan(values), "no target", "remove those rows, as a target cannot be filled in")
        return values.astype(np.int64) if target.classes else values

    def refuse(self, wrong: NDArray[np.bool_], what: str, remedy: str) -> None:
        """Raise `moretta.errors.ParameterError` if a row is wrong. what: the wrong content."""
        refuse(wrong, f"column {self._name!r} has {what}", remedy, f"{self._where}: ")

    def _numbers(self, number: Number) -> NDArray[np.float64]:
        values, exact = self._as_written(number)
        none = [word for word in number.absent or () if not isinstance(word, str)]
        return np.where(exact, without(values, none), values) if none else values

    def _as_written(self, number: Number) -> tuple[NDArray[np.float64], NDArray[np.bool_] | bool]:
        """Return numbers, and whether each is exact: no limit such as <5."""
        if self._column.dtype.kind == "f":
            values = self._column
            self.refuse(np.isinf(values), "infinite numbers", "remove or fix them")
            return self._finite(values), True
        if self._column.dtype.kind == "M":
            raise ParameterError(f'{self._where}: column {self._name!r} holds dates; set kind = "date" in the schema')
        decimal = self._form.decimal
        cells = words = bare(self._column, number, decimal, f"{self._where}: column {self._name!r}")
        numbers = as_numbers(words, decimal)
        if numbers is not None:
            return self._finite(numbers), True
        factor = np.ones(len(words))
        if number.censored != "refuse":
            words, factor = _uncensored(words, number.censored)
        wrong = ~are_numbers(words, decimal) & (words != "")
        self.refuse(wrong, "something other than a number", not_numbers(self._column[wrong], decimal))
        numbers = as_numbers(words, decimal)
        if numbers is None:  # a point where the decimal sign is a comma
            raise ParameterError(
                f'{self._where}: column {self._name!r} has numbers with a point, and the file has decimal = ","; use '
                "one sign in the whole file, and set decimal to it"
            )
        return self._finite(numbers * factor), words == cells

    def _finite(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            self.refuse(np.isinf(numbers.astype(np.float32)), "numbers beyond what float32 holds", "give another unit")
        return numbers

    def _within(self, values: NDArray[np.float64], limits: tuple[float, float] | None) -> NDArray[np.float64]:
        if limits is not None:
            with np.errstate(over="ignore"):  # in float32, as rows are kept
                kept, (least, most) = values.astype(np.float32), np.array(limits, np.float32)
            outside = (kept < least) | (kept > most)  # false for NaN
            fault = f"a value outside its range {limits[0]:g} to {limits[1]:g}"
            self.refuse(outside, fault, "fix those rows, or widen the range in the schema")
        return values

    def _days(self, feature: Date) -> NDArray[np.float64]:
        if self._column.dtype.kind == "M":
            days = self._column.astype(np.float64)
            days_found = np.where(np.isnat(self._column), np.nan, days)
        elif self._column.dtype.kind == "f":
            raise ParameterError(
                f"{self._where}: column {self._name!r} holds numbers; expected dates, as in the schema"
            )
        else:
            days_found = np.array([_day(word, feature.format) for word in self._column])
            self.refuse(np.isinf(days_found), f"no date of the form {feature.format!r}", "fix them, or give format")
        return self._within(days_found, None if feature.range is None else limits_of(feature))

    def _places(
        self, known: Sequence[str], spellings: Mapping[str, str] | None, *, unseen_is_blank: bool = False
    ) -> NDArray[np.float64]:
        """Return each word's index among the known ones, NaN for an empty one. Raises for an unknown word."""
        words, places = words_of(self._column), {word: float(place) for place, word in enumerate(known)}
        places |= {spelled: places[word] for spelled, word in (spellings or {}).items()}
        distinct, which = np.unique(words.astype(str), return_inverse=True)
        truths = {word.lower(): place for word, place in places.items() if word.lower() in ("true", "false")}
        otherwise = np.nan if unseen_is_blank else np.inf

        def place_of(word: str) -> float:
            return places.get(word, places.get(plain_number(word), truths.get(word.lower(), otherwise)))

        numbers = np.array([place_of(str(word)) if word else np.nan for word in distinct])
        column: NDArray[np.float64] = numbers[which]
        listed = ", ".join(known) if len(known) <= 8 else f"{len(known)} of them"
        remedy = f"fix those rows, or add the word to the schema at every site (it has {listed:.200})"
        self.refuse(np.isinf(column), "a word that the schema does not have", remedy)
        return column


_MARKS = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]"}


def marked(mark: str, decimal: str) -> re.Pattern[str]:
    """Return the pattern of a number with marks between its thousands."""
    fraction = "" if mark == decimal else rf"({re.escape(decimal)}[0-9]+)?"
    return re.compile(rf"^[+-]?[1-9][0-9]{{0,2}}({_MARKS.get(mark, re.escape(mark))}[0-9]{{3}})+{fraction}$")


def bare(words: Column, number: Number, decimal: str, where: str) -> Column:
    """Return cells without units and marks between thousands, and empty ones for absent values."""
    if number.thousands == decimal == ",":
        raise ParameterError(
            f'{where}: the mark between thousands and the decimal sign are both ","; expected two signs: correct '
            "thousands or decimal, or convert the column in [mapping.units] of silo.toml"
        )
    absent = [word for word in number.absent or () if isinstance(word, str)]
    if not (number.unit or number.thousands or absent):
        return words
    mark = number.thousands
    groups, drawn = (marked(mark, decimal), re.compile(_MARKS.get(mark, re.escape(mark)))) if mark else (None, None)

    def plain_cell(cell: str) -> str:
        if cell in absent:
            return ""
        text = without_unit(cell, number.unit) or cell
        if groups is None or drawn is None or not drawn.search(text):
            return text
        return drawn.sub("", text) if groups.match(text) else "not grouped by threes"

    return np.array([plain_cell(str(cell)) for cell in words], object)


def without_unit(cell: str, unit: str) -> str:
    """Return a cell without the unit after its number or before it: 45 for 45 %, -45 for -$45."""
    if cell.endswith(unit):
        return cell.removesuffix(unit).rstrip()
    sign = cell[:1] if cell[:1] in ("+", "-") else ""
    return sign + rest.removeprefix(unit).lstrip() if (rest := cell.removeprefix(sign)).startswith(unit) else cell


def plain_number(word: str) -> str:
    """Return a word without zeros after the decimal sign: 1.0 means the word 1, unless 1.0 is a word itself."""
    return re.sub(r"^([+-]?[0-9]+)[.,]0+$", r"\1", word)


def not_numbers(words: Column, decimal: str) -> str:
    """Return the remedy for cells that are not numbers, by their look; no cell is quoted."""
    texts = [str(word) for word in words]
    if not texts:
        return f'they have a decimal point, and decimal = "{decimal}" is declared: use one sign in the whole file'
    if decimal == "." and all(are_numbers(np.array(texts, object), ",")):
        if all(re.match(r"^[+-]?[0-9]{1,3},[0-9]{3}$", text) for text in texts):
            return (
                "they have a comma before three digits: remove it if it is between thousands, or set decimal = "
                '"," if it is before a fraction'
            )
        return 'they look like numbers with a decimal comma: set decimal = ","'
    if all(CENSORED.match(text) for text in texts):
        return 'they look like <5: set censored = "limit" or "half" in the schema'
    return 'fix them, or list the words that stand for no value, for example absent = ["n/a"]'


def _uncensored(words: Column, censored: str) -> tuple[Column, NDArray[np.float64]]:
    """Return words without < and >, and their factors: a half for an upper limit under "half"."""
    texts = words.astype(str)
    below = np.char.startswith(texts, "<") & (censored == "half")
    bare = np.array([CENSORED.sub("", text) for text in texts], object)
    negative = below & np.char.startswith(bare.astype(str), "-")  # half of it is no longer below
    return np.where(negative, words, bare), np.where(below & ~negative, 0.5, 1.0)


def _names(columns: Columns, name: str | None, where: str, form: Format) -> NDArray[np.str_] | None:
    """Return ids or groups; each row has one, in one line."""
    if name is None or name not in columns:
        return None
    words = words_of(columns[name]).astype(np.str_)
    reader = _Reader(where, name, columns[name], form)
    reader.refuse(words == "", "no value", "give every row its id or group")
    absent = np.isin(np.char.lower(words), ("na", "nan"))
    reader.refuse(absent, "na or nan, which may stand for no value,", "give every row its id or group")
    unprintable = np.array([not word.isprintable() for word in words])
    reader.refuse(unprintable, "line breaks or control characters", "remove them from the ids")
    return words


def _check_columns(columns: Columns, schema: Schema, where: str, *, labelled: bool, training: bool) -> None:
    needed = list(schema.features)
    needed += [name for name in (schema.name_of("group"), schema.name_of("id")) if name is not None and training]
    needed += [name for name in (schema.name_of("file"),) if name is not None]
    target = schema.name_of("target")
    if labelled:
        if target is None:
            raise ParameterError(f'{where}: the schema has no column of kind "target"; add one')
        needed.append(target)
    for name in needed:
        if name not in columns:
            raise ParameterError(
                f"{where}: the column {name!r} of the schema is missing among its {len(columns)}; "
                f"{hint_of(name, columns)}"
            )
    unknown = [name for name in columns if name not in schema.columns]
    if training and unknown:
        raise ParameterError(
            f"{where}: the schema lacks the column {unknown[0]!r}; add it there with its kind, or with kind = "
            '"drop" to leave it out'
        )


def hint_of(name: str, columns: Columns) -> str:
    """Return the end of a sentence about a missing column. A first line that is a row is never quoted."""
    close = nearest(name, columns)
    return f'did you mean "{close}"?' if close else "does its first line have the names of columns?"


def _day(word: str, form: str) -> float:
    """Return days since 1970-01-01; NaN for an empty word, infinity for a word that is not a date."""
    if not word:
        return np.nan
    try:
        return float(datetime.strptime(word, form).date().toordinal() - _EPOCH)
    except ValueError:
        return np.inf


def limits_of(feature: Feature) -> tuple[float, float]:
    """Return the least and the largest coded value of a feature with a range."""
    match feature:
        case Ordered():
            return 0.0, float(len(feature.categories) - 1)
        case Date(range=(first, last)):
            return float(first.toordinal() - _EPOCH), float(last.toordinal() - _EPOCH)
        case Number(range=(least, most)):
            return least, most
    raise ParameterError("a median needs a range; declare one in the schema")
