"""What the columns of a table probably mean, where no schema says so.

`propose` makes the best guess at every column. Where it cannot be sure there is a doubt: what was seen, as shares and
counts, and what the column may be, each with the lines of schema.toml that say so. `moretta schema init` writes both
down for somebody to decide; `infer` takes the guesses for a run, and refuses doubts. No cell is ever quoted.

**More rows, no fewer questions.** A doubt looks at the set of a column's cells, never at their order. What it asks of
all cells holds for any part of them, and what it finds in some cells, as 999, it finds wherever these are. So a file
that is asked about is asked about when it is shuffled, sorted or halved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import tomli_w
from numpy.typing import NDArray

from moretta.data.tables.evidence import (
    FEW_ROWS,
    are_days,
    are_years,
    as_written,
    date_formats,
    is_cell,
    is_name_of_ids,
    lone_zero,
    spellings,
    stand_for_none,
    with_leading_zero,
)
from moretta.data.tables.files import Column, Columns, Format, are_numbers, as_numbers
from moretta.data.tables.rows import CENSORED, hint_of, not_numbers, plain_number, words_of
from moretta.data.tables.schema import (
    Blanks,
    Category,
    ColumnKind,
    Date,
    Drop,
    File,
    Grouping,
    Id,
    Number,
    Ordered,
    Schema,
    Target,
)
from moretta.errors import ParameterError

Task = Literal["classification", "regression"]
Encoding = Literal["one-hot", "yes-no", "ordinal"]
Missing = Literal["error", "mean", "median", "indicator"]

ID_KINDS = ("id", "group")
YES_NO = ("no", "yes")
MOST_CATEGORIES = 30  # and in more than a tenth of the rows: probably names or free text
MOST_NUMBERS = 10  # that are classes of a target: more are probably amounts
MOST_ODD = 5  # words among numbers that are listed as standing for no value
LEAST_SHOWN = 5  # rows with each of the words that may be ids
LINE = 100  # characters of a list in schema.toml
RARE = 0.02  # of the rows: less is no class that anybody expects among three or more
HOW = "Answer in the schema that `moretta schema init FILE` proposes, and name it by [data] schema"
_BLANKS: Mapping[Missing, Blanks] = {"error": "refuse", "mean": "mean", "median": "mean", "indicator": "indicator"}
_PLACEHOLDERS = frozenset(
    {"unknown", "n/a", "none", "missing", "unk", "-", "--", ".", "null", "tbd", "nil", "undefined"}
)
MEDIAN = (
    "lacks values, and a median is counted within a range, which a schema declares (moretta schema init FILE); give "
    'one, or set missing = "mean"'
)


@dataclass(frozen=True)
class Reading:
    """One thing that a column may be.

    column: how schema.toml says so; None where it cannot, and `what` has the remedy. key: of a run file without a
    schema, which says so too.
    """

    what: str
    column: ColumnKind | None = None
    key: str = ""

    def __str__(self) -> str:
        """Return it with the lines of schema.toml, but for words: those are cells."""
        if self.column is None:
            return self.what
        plain = _plain(self.column)
        words = [key for key in ("categories", "classes", "spellings", "absent") if _has_words(plain.get(key))]
        lines = ", ".join(_lines({key: value for key, value in plain.items() if key not in words}))
        also = f"{self.key}, or in a schema " if self.key else ""
        return f"{self.what} ({also}{lines}{''.join(f', {key} = ...' for key in words)})"


@dataclass(frozen=True)
class Doubt:
    """A question about a column. evidence: what was seen, as shares and counts. readings: what the column may be."""

    evidence: str
    readings: tuple[Reading, ...] = ()

    def __str__(self) -> str:
        return self.evidence + (f": {', or '.join(map(str, self.readings))}?" if self.readings else "")


@dataclass(frozen=True)
class Guess:
    """What a column probably is. doubt: what is not sure; None where nothing is."""

    column: ColumnKind
    doubt: Doubt | None = None


@dataclass(frozen=True)
class Hints:
    """What is known without a schema.

    target: its name, None for the last column. id_column: its name, if any. header: whether the first line is known to
    have the names of columns. known: whether all columns are known to be what they look like.
    """

    target: str | None = None
    task: Task | None = None
    id_column: str | None = None
    encoding: Encoding = "one-hot"
    missing: Missing = "error"
    drop: tuple[str, ...] = ()
    header: bool = False
    known: bool = False


def infer(columns: Columns, wanted: Hints, where: str, form: Format) -> Schema:
    """Return the schema of a file that has none. where: the file, which begins the sentence of an error.

    Raises `moretta.errors.ParameterError`, with the question, for what cannot be known for sure.
    """
    guesses = propose(columns, wanted, where, form)
    target = wanted.target or list(columns)[-1]
    asked = sorted((name for name, guess in guesses.items() if guess.doubt is not None), key=lambda one: one != target)
    doubts = [f"column {name!r} {guesses[name].doubt}" for name in asked]
    if doubts:
        more = f" (there are {len(doubts)} such questions)" if len(doubts) > 1 else ""
        how = f" {HOW}{more}" if doubts[0].endswith("?") else ""
        raise ParameterError(f"{where}: {doubts[0]}{how}")
    blank = {name: int(_absent(columns[name]).sum()) for name, guess in guesses.items() if _refuses_blanks(guess)}
    lacking = {name: count for name, count in blank.items() if count}
    if lacking:
        raise ParameterError(_lacking(where, lacking, len(next(iter(columns.values()))), wanted))
    if wanted.missing == "median":
        for name, guess in guesses.items():
            if isinstance(guess.column, Number) and _absent(columns[name]).any():
                raise ParameterError(f"{where}: column {name!r} {MEDIAN}")
    return Schema(columns={name: guess.column for name, guess in guesses.items()})


def propose(columns: Columns, wanted: Hints, where: str, form: Format) -> dict[str, Guess]:
    """Return the best guess at each column, in the file's order.

    Raises `moretta.errors.ParameterError` for a target or an id column that the file does not have, and where the first
    line looks like a row.
    """
    target = wanted.target or list(columns)[-1]
    for key, name in (("the target", wanted.target), ("id-column", wanted.id_column)):
        if name is not None and name not in columns:
            raise ParameterError(f'{where} has no column "{name}" for {key}; {hint_of(name, columns)}')
    if target == wanted.id_column:
        which = "the last column, and so the target as none is named" if wanted.target is None else "the target too"
        raise ParameterError(f'{where}: id-column "{target}" is {which}; name another column as target')
    if not [name for name in columns if name not in (target, wanted.id_column, *wanted.drop)]:
        raise ParameterError(
            f"{where} has no column beside the target; expected at least one. Is its separator another "
            f"(--separator), or does its first line not have the names of columns?"
        )
    cells = {name: _Cells(name, column, wanted, form) for name, column in columns.items()}
    if not wanted.header and not wanted.known:
        _check_header(cells, where)
    return _once({name: _guess(one, name == target) for name, one in cells.items()}, wanted)


def _check_header(cells: Mapping[str, _Cells], where: str) -> None:
    """Raise where the first line looks like a row. No name is quoted, as it may be a cell."""
    if any(one.numbers is not None and one.rows for one in cells.values()):
        return  # words above numbers are names
    alike = sum(is_cell(name, one.words) for name, one in cells.items())
    if alike > 1 or 2 * alike >= len(cells):
        raise ParameterError(
            f"{where}: is there a header line? In {alike} of {len(cells)} columns the first line looks like the cells "
            "below it. If it is a row, add a line of names above it; if it has the names, say --header to moretta "
            "schema init"
        )


def _once(guesses: dict[str, Guess], wanted: Hints) -> dict[str, Guess]:
    """Return guesses with one id and one group at most, as a schema has them; ids by name come first."""
    taken = {"id"} if wanted.id_column is not None else set[str]()
    asked = {
        name: guess for name, guess in guesses.items() if guess.doubt is not None and guess.column.kind in ID_KINDS
    }
    for name in sorted(asked, key=lambda one: is_name_of_ids(one, 3, 3), reverse=True):
        kind, doubt = guesses[name].column.kind, asked[name].doubt
        if kind in taken and doubt is not None:
            ids, other = doubt.readings
            left = Reading(ids.what, Drop())
            readings = (left, other) if is_name_of_ids(name, 3, 3) else (other, left)
            guesses[name] = Guess(readings[0].column or Drop(), Doubt(doubt.evidence, readings))
        taken.add(kind)
    return guesses


def infer_labels(columns: Columns, wanted: Hints, group_column: str | None, where: str, form: Format) -> Schema:
    """Return the schema of a table that names files of images in its column "file", where it has none.

    Columns that are not named are left out. Raises `moretta.errors.ParameterError`, with the remedy, for a column that
    is not there, and for a target that cannot be known for sure.
    """
    named = {"file": "file", "id-column": wanted.id_column, "group-column": group_column}
    named["the target"] = wanted.target or list(columns)[-1]
    names = [name for name in named.values() if name is not None]
    for key, name in named.items():
        if name is not None and name not in columns:
            raise ParameterError(f'{where} has no column "{name}" for {key}; {hint_of(name, columns)}')
    if len(set(names)) < len(names):
        raise ParameterError(
            f'{where}: file, id-column, group-column and the target must be different columns, and "{names[-1]}" is '
            "the target; name another"
        )
    guess = _guess(_Cells(names[-1], columns[names[-1]], wanted, form), is_target=True)
    if guess.doubt is not None:
        raise ParameterError(f"{where}: column {names[-1]!r} {guess.doubt}")
    kinds: dict[str | None, ColumnKind] = {"file": File(), wanted.id_column: Id(), group_column: Grouping()}
    kinds[names[-1]] = guess.column
    return Schema(columns={name: kinds.get(name, Drop()) for name in columns})


@dataclass(frozen=True, eq=False)
class _Cells:
    """A column's cells."""

    name: str
    column: Column
    wanted: Hints
    form: Format

    @cached_property
    def there(self) -> NDArray[np.bool_]:
        """Which rows have a value, bool[rows]."""
        return ~_absent(self.column)

    @property
    def rows(self) -> int:
        """How many rows have a value."""
        return int(self.there.sum())

    @property
    def absent(self) -> int:
        """How many rows have none."""
        return len(self.column) - self.rows

    @cached_property
    def numbers(self) -> NDArray[np.float64] | None:
        """All cells as numbers, NaN where absent; None if any is something else."""
        if self.column.dtype.kind == "M":
            return None
        return self.column if self.column.dtype.kind == "f" else as_numbers(self.column, self.form.decimal)

    @cached_property
    def dates(self) -> tuple[str, ...] | None:
        """The forms of date that all cells have, none that is known perhaps; None where they are no dates."""
        if self.column.dtype.kind == "M":
            return ("%Y-%m-%d",)
        if self.numbers is not None:
            return ("%Y%m%d",) if are_days(self.values) else None
        return date_formats(self.words)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many rows have each word, as it is written."""
        there = self.column[self.there]
        found, counts = np.unique(there.astype(str) if there.dtype.kind == "O" else there, return_counts=True)
        return dict(zip(map(str, words_of(found)), counts.tolist(), strict=True))

    @property
    def words(self) -> list[str]:
        """The words that differ, as they are written, sorted."""
        return list(self.counts)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The numbers that differ, sorted."""
        return np.empty(0) if self.numbers is None else np.unique(self.numbers[self.there])

    @property
    def differing(self) -> int:
        """How many values differ."""
        return len(self.words) if self.numbers is None else len(self.values)

    @property
    def whole(self) -> bool:
        """Whether no number has a fraction."""
        return bool((self.values == np.round(self.values)).all())

    @property
    def many(self) -> bool:
        """Whether there are too many different values for categories or classes."""
        count = len(self.words)
        return (count > MOST_CATEGORIES and count > self.rows / 10) or (count > FEW_ROWS and count >= self.rows / 3)

    def within(self, words: Iterable[str] | None = None) -> str:
        """Return in how many rows these words are; in all: None."""
        count = self.rows if words is None else sum(self.counts[word] for word in words)
        return f"in {count} of {self.rows} rows"

    @property
    def filled(self) -> Blanks:
        """What becomes of values that turn out to be absent."""
        return "indicator" if self.wanted.missing == "indicator" else "mean"

    @property
    def number(self) -> Number:
        """The column as numbers."""
        return Number(blanks=_BLANKS[self.wanted.missing] if self.absent else "refuse")

    @property
    def category(self) -> Category | Drop:
        """The column as categories, or left out where they are too many."""
        return Drop() if self.many or not self.words else self.categories(tuple(self.words))

    def categories(self, words: tuple[str, ...], spelled: dict[str, str] | None = None) -> Category:
        """Return the column with these categories."""
        blank = self.absent and self.wanted.missing != "error"
        return Category(categories=words, blanks="category" if blank else "refuse", spellings=spelled)

    @property
    def target(self) -> Target:
        """The column as a target with its classes; where they are too many they are cells, and not listed."""
        if self.wanted.task == "regression" or (self.many and self.wanted.task is None):
            return Target()
        words = self.words
        if self.numbers is not None:  # 1.0 is class 1, where all are read as such
            plain = [str(word) for word in words_of(self.values)]
            words = plain if {plain_number(word) for word in words} <= {*plain} else words
        return Target(classes=tuple(sorted(words, key=_place)) if len(words) > 1 else ())


def _guess(cells: _Cells, is_target: bool) -> Guess:
    if cells.name == cells.wanted.id_column:
        return Guess(Id())
    if cells.name in cells.wanted.drop:
        return Guess(Drop())
    doubts = _of_target(cells) if is_target else _of_feature(cells)
    doubt = None if cells.wanted.known else next(doubts, None)
    if doubt is not None:
        columns = [reading.column for reading in doubt.readings if reading.column is not None]
        if is_target:
            doubt = Doubt(f"is the target and {doubt.evidence}", doubt.readings)
        return Guess(columns[0] if columns else Target() if is_target else Drop(), doubt)
    if is_target:
        return Guess(Target() if _is_amount(cells) else cells.target)
    if cells.numbers is not None:
        return Guess(cells.number)
    words = tuple(cells.words)
    if len(words) > 1 and (cells.wanted.encoding == "ordinal" or (cells.wanted.encoding, words) == ("yes-no", YES_NO)):
        return Guess(Ordered(categories=words, blanks=cells.number.blanks))
    return Guess(cells.categories(words))


def _is_amount(cells: _Cells) -> bool:
    """Whether a target's numbers are amounts, as they have fractions or are written with such."""
    if cells.numbers is None or cells.wanted.task == "classification":
        return False
    written = cells.column.dtype.kind != "f" and any(mark in word for word in cells.words for mark in ".,eE")
    return cells.wanted.task == "regression" or written or not cells.whole


# The table of doubts: what is seen, and what the column may be. The first is asked.

LEFT_OUT = Reading("leave it out", Drop())
OTHER_TARGET = "name another column as target (--target)"
LIST_CLASSES = Reading('list all its classes, as classes = ["0", "1"]')
AMOUNTS = Reading("amounts", Target(), 'task = "regression"')


def _of_feature(cells: _Cells) -> Iterator[Doubt]:
    if not cells.rows:
        yield Doubt("has no value at all", (LEFT_OUT, Reading("fill it in")))
    yield from _of_marks(cells)
    yield from _of_mixture(cells)
    if (forms := cells.dates) is not None:
        blanks = cells.filled if cells.absent else "refuse"
        days = [Reading("train on the day", Date(format=form, blanks=blanks)) for form in forms]
        rewrite = Reading('write them in one way, and say kind = "date" with its format, as of strptime')
        seen = f"holds dates {cells.within()}" if forms else "holds dates of no one form that is known here"
        yield Doubt(seen, (*days, LEFT_OUT) if forms else (LEFT_OUT, rewrite))
    each, named = cells.differing == cells.rows, is_name_of_ids(cells.name, cells.differing, cells.rows)
    if cells.whole and (named or (each and cells.rows >= FEW_ROWS)) and not are_years(cells.name, cells.values):
        seen = f"{'all' if each else cells.differing} values differ {cells.within()}"
        ids = Drop() if cells.absent else Id() if each else Grouping()
        words = cells.category if cells.rows >= LEAST_SHOWN * cells.differing else Drop()  # those of few rows are cells
        other = Reading("words", words) if cells.numbers is None else Reading("numbers", cells.number)
        yield Doubt(
            f"looks like ids or row numbers{', as its name says' if named else ''}, and {seen}",
            (Reading("ids, which no model should see", ids, "id-column"), other),
        )
    yield from _of_codes(cells)
    if cells.numbers is None and cells.many:
        listed = Reading('kind = "category", with a list of all its categories')
        seen = f"has {len(cells.words)} different words {cells.within()}, too many to be categories"
        yield Doubt(seen, (LEFT_OUT, listed))
    yield from _of_spellings(cells)
    yield from _of_no_values(cells)


def _of_marks(cells: _Cells) -> Iterator[Doubt]:
    """Ask about marks between thousands, and signs and units behind numbers."""
    decimal = cells.form.decimal
    if cells.column.dtype.kind == "O" and (number := as_written(cells.words, decimal)) is not None:
        mark, number = number.thousands, number.model_copy(update={"blanks": cells.number.blanks})
        other = Reading("words", cells.category)
        if mark in (decimal, ","):
            other = Reading('fractions, for which say decimal = ","')
        if mark == decimal:
            other = Reading("fractions", cells.number)
        odd = [word for word in cells.words if (mark or number.unit) in word]
        seen = "a comma or other mark before three digits" if mark else "a sign or unit behind numbers"
        read = Reading("marks between thousands" if mark else "numbers", number)
        yield Doubt(f"has {seen} {cells.within(odd)}", (read, other))


def _of_mixture(cells: _Cells) -> Iterator[Doubt]:
    """Ask about numbers and words in one column, or numbers with < or a decimal comma."""
    decimal, words = cells.form.decimal, np.array(cells.words, object)
    bare = np.array([word.lstrip("<>= ") for word in cells.words], object)
    kinds = [are_numbers(words, decimal), are_numbers(words, ","), are_numbers(bare, decimal)]
    if cells.numbers is not None or not any(kind.any() for kind in kinds):
        return
    odd, number = [str(word) for word in words[~kinds[0]]], cells.number
    readings = (Reading("categories", cells.category), Reading("numbers, once the rest is mended"))
    if odd and all(CENSORED.match(word) for word in odd):
        half, limit = (number.model_copy(update={"censored": how}) for how in ("half", "limit"))
        readings = (Reading("half of a limit", half), Reading("the limit", limit))
    elif 0 < len(odd) <= MOST_ODD and not kinds[1][~kinds[0]].any():
        none = number.model_copy(update={"absent": tuple(odd), "blanks": cells.filled})
        readings = (Reading("numbers, and words for no value", none), readings[0])
    seen = f"holds numbers, and {cells.within(odd)} something else"
    yield Doubt(f"{seen}; {not_numbers(words[~kinds[0]], decimal)}", readings)


def _of_codes(cells: _Cells) -> Iterator[Doubt]:
    if cells.numbers is not None and (coded := with_leading_zero(cells.words)):
        seen = f"has numbers that begin with a zero {cells.within(coded)}"
        yield Doubt(seen, (Reading("codes", cells.category), Reading("numbers", cells.number)))


def _of_spellings(cells: _Cells) -> Iterator[Doubt]:
    if cells.numbers is None and not cells.many and (spelled := spellings(cells.words, cells.counts)):
        words = tuple(word for word in cells.words if word not in spelled)
        seen = f"has words {cells.within(spelled)} that differ from others by capitals alone or are short for them"
        alike = Reading("spellings", cells.categories(words, spelled))
        yield Doubt(seen, (alike, Reading("other words", cells.category)))


def _of_no_values(cells: _Cells) -> Iterator[Doubt]:
    if cells.numbers is None:
        return
    codes, zeros = stand_for_none(cells.values), int((cells.numbers == 0).sum())
    if codes or lone_zero(cells.values, zeros, cells.rows):
        count = int(np.isin(cells.numbers, codes or [0.0]).sum())
        none = cells.number.model_copy(update={"absent": tuple(codes or [0.0]), "blanks": cells.filled})
        seen = f"has numbers in {count} of {cells.rows} rows that lie apart from all others, as those for no value do"
        yield Doubt(seen, (Reading("no value", none), Reading("numbers", cells.number)))


def _of_target(cells: _Cells) -> Iterator[Doubt]:
    """Ask about a target; where it lacks values too, say so first."""
    first = next(_of_outcome(cells), None)
    if not cells.absent:
        yield from [] if first is None else [first]
        return
    lacking = f"lacks values in {cells.absent} of {len(cells.column)} rows"
    seen = f"{lacking}; remove those rows, as a target cannot be filled in"
    then = Reading("then", Target() if _is_amount(cells) else cells.target)
    yield Doubt(seen, (then,)) if first is None else Doubt(f"{seen}; it {first.evidence}", first.readings)


def _of_outcome(cells: _Cells) -> Iterator[Doubt]:
    other, classes, task = Reading(OTHER_TARGET, Drop()), Reading("classes", cells.target), cells.wanted.task
    if cells.differing < 2:
        seen = "has the same value in every row; expected two classes or more"
        yield Doubt(seen, (other, Reading("add rows of other classes")))
    if np.isinf(cells.values).any():
        yield Doubt("infinite in some rows; remove or mend them")
    if cells.dates is not None:
        yield Doubt(f"holds dates {cells.within()}", (other, LIST_CLASSES))
    if cells.numbers is None and task == "regression":
        said = not_numbers(np.array(cells.words, object), cells.form.decimal)
        yield Doubt(f"holds words where a regression has numbers; {said}")
    for doubt in (*_of_marks(cells), *_of_mixture(cells)):
        read = Reading("fractions", Target()) if cells.numbers is not None else other if cells.many else classes
        yield Doubt(doubt.evidence, (read, Reading("numbers, once they are written as such")))
    for doubt in _of_codes(cells) if task is None and not cells.many else ():
        yield Doubt(doubt.evidence, (classes, AMOUNTS))
    for doubt in _of_spellings(cells):
        words, spelled = (getattr(doubt.readings[0].column, key) for key in ("categories", "spellings"))
        one = other if len(words) < 2 else Reading("spellings", Target(classes=words, spellings=spelled))
        yield Doubt(doubt.evidence, (one, classes))
    if cells.numbers is None and (unknown := [word for word in cells.words if word.lower() in _PLACEHOLDERS]):
        seen = f"has a word such as `unknown` {cells.within(unknown)}, which is no outcome"
        yield Doubt(seen, (classes, Reading("remove those rows")))
    yield from _of_many(cells)
    for doubt in _of_no_values(cells) if _is_amount(cells) else ():
        yield Doubt(doubt.evidence, (Reading("amounts", Target()), Reading("no value: remove those rows")))
    rare = [word for word in cells.words if cells.counts[word] < RARE * cells.rows]
    if (
        not _is_amount(cells)
        and cells.rows >= FEW_ROWS
        and 0 < len(rare) <= cells.differing / 2
        and cells.differing > 2
    ):
        seen = f"has {len(rare)} of its {cells.differing} values {cells.within(rare)} only"
        yield Doubt(seen, (classes, Reading("mend them") if cells.numbers is None else AMOUNTS))


def _of_many(cells: _Cells) -> Iterator[Doubt]:
    """Ask about ages, amounts, ids and free text as targets, of which each would be a class."""
    count = cells.differing
    each = count > 3 and count > cells.rows / 2
    if cells.numbers is None and (cells.many or each):
        seen = f"has {count} different words {cells.within()}, too many to be classes"
        yield Doubt(seen, (Reading(f"ids or free text: {OTHER_TARGET}", Drop()), LIST_CLASSES))
    elif (
        cells.numbers is not None
        and cells.wanted.task is None
        and not _is_amount(cells)
        and (count > MOST_NUMBERS or each)
    ):
        ids = Reading(f"ids: {OTHER_TARGET}", Drop())
        readings = (ids, AMOUNTS) if is_name_of_ids(cells.name, count, cells.rows) else (AMOUNTS, LIST_CLASSES, ids)
        yield Doubt(f"has {count} different whole numbers {cells.within()}", readings)


def _place(word: str) -> tuple[float, str]:
    """Return a key by which numbers are sorted as numbers, and words behind them as words."""
    try:
        return (float(word), "")
    except ValueError:
        return (np.inf, word)


def _absent(column: Column) -> NDArray[np.bool_]:
    if column.dtype.kind == "O":
        return np.asarray(column == "", np.bool_)
    return np.isnat(column) if column.dtype.kind == "M" else np.isnan(column)


def _refuses_blanks(guess: Guess) -> bool:
    column = guess.column
    return isinstance(column, Id) or getattr(column, "blanks", "") == "refuse"


def _lacking(where: str, lacking: Mapping[str, int], rows: int, wanted: Hints) -> str:
    listed = ", ".join(f"column {name!r} in {count} of {rows} rows" for name, count in lacking.items())
    if wanted.id_column in lacking:
        remedy = "give every row its id"
    else:
        remedy = 'fill them in, or set missing = "mean" or "indicator"'
    return f"{where} lacks values: {listed:.400}; {remedy}"


MOST = 6  # words that are listed


def lines_of(schema: Schema) -> list[str]:
    """Return a line for each kind of column: which they are, their categories, what is left out, and the target."""
    by_kind: dict[str, list[str]] = {}
    for name, column in schema.columns.items():
        match column:
            case Number(unit=unit):
                by_kind.setdefault("numbers", []).append(f"{name} ({unit})" if unit else name)
            case Date():
                by_kind.setdefault("dates", []).append(name)
            case Category(categories=words):
                by_kind.setdefault("categories", []).append(f"{name} ({_listed(words)})")
            case Ordered(categories=words):
                by_kind.setdefault("ordered categories", []).append(f"{name} ({_listed(words, ' < ')})")
    kinds = {"images (file)": "file", "not trained on (id)": "id", "kept together (group)": "group"}
    kinds |= {"not read (drop)": "drop"}
    for said, kind in kinds.items():
        if found := [name for name, column in schema.columns.items() if column.kind == kind]:
            by_kind[said] = found
    lines = [f"{said}: {', '.join(names)}" for said, names in by_kind.items()]
    target = schema.name_of("target")
    if target is not None:
        lines.append(f"target: {target}, " + (f"classes {_listed(schema.classes)}" if schema.classes else "a number"))
    return lines


def as_toml(guesses: Mapping[str, Guess]) -> str:
    """Return guesses as schema.toml, each doubt as a comment above its column, with the lines that settle it."""
    parts = []
    for name, guess in guesses.items():
        text = "\n".join([tomli_w.dumps({"columns": {name: {}}}).strip(), *_lines(_plain(guess.column)), ""])
        if guess.doubt is not None:  # and nothing loads it before somebody has decided
            text = _question(guess.doubt) + text.replace(
                f'kind = "{guess.column.kind}"', f'kind = "decide"  # perhaps "{guess.column.kind}"', 1
            )
        parts.append(text)
    return "\n".join(parts)


def _question(doubt: Doubt) -> str:
    lines = [
        f"decide: it {doubt.evidence}",
        "Below the name of the column write what it is, and remove other lines there:",
    ]
    for reading in doubt.readings:
        lines.append(f"- {reading.what}{':' if reading.column is not None else ''}")
        lines += [] if reading.column is None else [f"    {line}" for line in _lines(_plain(reading.column))]
    return "".join(f"# {line}\n" for line in lines)


def _plain(column: ColumnKind) -> dict[str, Any]:
    return {"kind": column.kind} | column.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _lines(plain: Mapping[str, Any]) -> list[str]:
    """Return keys as lines of TOML, of which lists and tables take one if they fit."""
    lines = list[str]()
    for key, value in plain.items():
        line = tomli_w.dumps({key: value}).strip()
        if isinstance(value, dict):
            line = f"{key} = {{ {', '.join(_lines(value))} }}"
        elif isinstance(value, list):
            one = ", ".join(tomli_w.dumps({"x": part}).strip().removeprefix("x = ") for part in value)
            line = line if len(one) > LINE else f"{key} = [{one}]"
        lines += line.splitlines()
    return lines


def _has_words(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, str) for one in value))


def _listed(words: tuple[str, ...], between: str = ", ") -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return between.join(words[:MOST]) + more
