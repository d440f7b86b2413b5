"""The table of doubts: evidence in a column without a schema, and the column's possible meanings.

A doubt looks at the set of a column's cells, never at their order. A condition on all cells holds for any part of them,
and evidence in some cells, such as 999, does not depend on their place. So a file that raises a doubt also raises it
when it is shuffled, sorted or halved. No cell is ever quoted.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
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
    is_name_of_codes,
    is_name_of_ids,
    is_name_of_people,
    lone_zero,
    spellings,
    stand_for_none,
    with_leading_zero,
)
from moretta.data.tables.files import Column, Format, are_numbers, as_numbers
from moretta.data.tables.rows import CENSORED, not_numbers, plain_number, words_of
from moretta.data.tables.schema import Blanks, Category, ColumnKind, Date, Drop, Grouping, Id, Number, Target

Task = Literal["classification", "regression"]
Encoding = Literal["one-hot", "yes-no", "ordinal"]
Missing = Literal["error", "mean", "median", "indicator"]

MOST_CATEGORIES = 30  # and in more than a tenth of the rows: probably names or free text
MOST_NUMBERS = 10  # as classes of a target: more are probably amounts
MOST_ODD = 5  # words among numbers that are listed as absent values
LEAST_SHOWN = 5  # rows with each word that may be an id
LINE = 100  # characters of a list in schema.toml
MOST_ORDERS = 10**9  # of classes along a column: numbers part them by chance less than once in so many
RARE = 0.02  # of the rows: fewer make no plausible class among three or more
_BLANKS: Mapping[Missing, Blanks] = {"error": "refuse", "mean": "mean", "median": "mean", "indicator": "indicator"}
_PLACEHOLDERS = frozenset(
    {"unknown", "n/a", "none", "missing", "unk", "-", "--", ".", "null", "tbd", "nil", "undefined"}
)


@dataclass(frozen=True)
class Hints:
    """The user's hints where there is no schema.

    Attributes:
        target: The name of the target's column; None takes the last one.
        id_column: The name of the column of ids; None without one.
        header: Whether the first line surely has the names of columns.
        known: Whether all columns surely are what they look like.
    """

    target: str | None = None
    task: Task | None = None
    id_column: str | None = None
    encoding: Encoding = "one-hot"
    missing: Missing = "error"
    drop: tuple[str, ...] = ()
    header: bool = False
    known: bool = False


@dataclass(frozen=True)
class Reading:
    """One reading of a column.

    Attributes:
        column: Its form in schema.toml. None if that has no form for it, and `what` has the remedy.
        key: A key of a run file with the same meaning without a schema.
    """

    what: str
    column: ColumnKind | None = None
    key: str = ""

    def __str__(self) -> str:
        """Return it with the lines of schema.toml, except words, which are cells."""
        if self.column is None:
            return self.what
        plain = plain_form(self.column)
        words = [key for key in ("categories", "classes", "spellings", "absent") if _has_words(plain.get(key))]
        lines = ", ".join(toml_lines({key: value for key, value in plain.items() if key not in words}))
        also = f"{self.key}, or in a schema " if self.key else ""
        return f"{self.what} ({also}{lines}{''.join(f', {key} = ...' for key in words)})"


@dataclass(frozen=True)
class Doubt:
    """A question about a column. evidence: as shares and counts. readings: what the column may be."""

    evidence: str
    readings: tuple[Reading, ...] = ()

    def __str__(self) -> str:
        return self.evidence + (f": {', or '.join(map(str, self.readings))}?" if self.readings else "")


@dataclass(frozen=True, eq=False)
class Cells:
    """A column's cells."""

    name: str
    column: Column
    hints: Hints
    form: Format

    @cached_property
    def there(self) -> NDArray[np.bool_]:
        """The rows that have a value, bool[rows]."""
        return ~absent_in(self.column)

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """Each row's index among the different cells."""
        return np.unique(
            self.column.astype(str) if self.column.dtype.kind == "O" else self.column, return_inverse=True
        )[1]

    @property
    def rows(self) -> int:
        """The number of rows with a value."""
        return int(self.there.sum())

    @property
    def absent(self) -> int:
        """The number of rows without a value."""
        return len(self.column) - self.rows

    @cached_property
    def numbers(self) -> NDArray[np.float64] | None:
        """All cells as numbers, NaN where absent; None if some cell is not a number."""
        if self.column.dtype.kind == "M":
            return None
        return self.column if self.column.dtype.kind == "f" else as_numbers(self.column, self.form.decimal)

    @cached_property
    def dates(self) -> tuple[str, ...] | None:
        """The known forms of date that all cells have, may be empty; None if they are not dates."""
        if self.column.dtype.kind == "M":
            return ("%Y-%m-%d",)
        if self.numbers is not None:
            return ("%Y%m%d",) if are_days(self.values) else None
        return date_formats(self.words)

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of rows with each word, as written."""
        there = self.column[self.there]
        distinct, counts = np.unique(there.astype(str) if there.dtype.kind == "O" else there, return_counts=True)
        return dict(zip(map(str, words_of(distinct)), counts.tolist(), strict=True))

    @property
    def words(self) -> list[str]:
        """The different words, as written, sorted."""
        return list(self.counts)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The different numbers, sorted."""
        return np.empty(0) if self.numbers is None else np.unique(self.numbers[self.there])

    @property
    def differing(self) -> int:
        """The number of different values."""
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
        """Return the phrase for the number of rows with these words; None means all rows with a value."""
        count = self.rows if words is None else sum(self.counts[word] for word in words)
        return f"in {count} of {self.rows} rows"

    @property
    def filled(self) -> Blanks:
        """The treatment of values that turn out to be absent."""
        return "indicator" if self.hints.missing == "indicator" else "mean"

    @property
    def number(self) -> Number:
        """The column as numbers."""
        return Number(blanks=_BLANKS[self.hints.missing] if self.absent else "refuse")

    def worded(self, what: str) -> tuple[Reading, ...]:
        """Return the readings of the column as words. what: the kind of words."""
        few = self.words and not self.many
        return (Reading(what, self.categories(tuple(self.words))),) if few else (LEFT_OUT, LISTED)

    def categories(self, words: tuple[str, ...], spelled: dict[str, str] | None = None) -> Category:
        """Return the column with these categories."""
        blank = self.absent and self.hints.missing != "error"
        return Category(categories=words, blanks="category" if blank else "refuse", spellings=spelled)

    @property
    def target(self) -> Target:
        """The column as a target with its classes; too many of them are cells, and not listed."""
        if self.hints.task == "regression" or (self.many and self.hints.task is None):
            return Target()
        words = self.words
        if self.numbers is not None:  # 1.0 is class 1, where all are read as such
            plain = [str(word) for word in words_of(self.values)]
            words = plain if {plain_number(word) for word in words} <= {*plain} else words
        return Target(classes=tuple(sorted(words, key=_place)) if len(words) > 1 else ())


def is_amount(cells: Cells) -> bool:
    """Return whether a target's numbers are amounts: they have fractions, or are written with them."""
    if cells.numbers is None or cells.hints.task == "classification":
        return False
    written = cells.column.dtype.kind != "f" and any(mark in word for word in cells.words for mark in ".,eE")
    return cells.hints.task == "regression" or written or not cells.whole


LEFT_OUT = Reading("leave it out", Drop())
LISTED = Reading('kind = "category", with a list of all its categories')
FIX = Reading("fix them")
OTHER_TARGET = "name another column as target (--target)"
LIST_CLASSES = Reading('list all its classes, as classes = ["0", "1"]')
AMOUNTS = Reading("amounts", Target(), 'task = "regression"')


def of_feature(cells: Cells) -> Iterator[Doubt]:
    """Ask about a column that is trained on."""
    if not cells.rows:
        yield Doubt("has no values", (LEFT_OUT, Reading("fill it in")))
    if cells.numbers is None and cells.differing > FEW_ROWS and is_name_of_people(cells.name):
        seen = f"looks like names of people, as its name says, and {cells.differing} differ {cells.within()}"
        yield Doubt(seen, (LEFT_OUT, LISTED))
    yield from _of_marks(cells)
    yield from _of_mixture(cells)
    if (forms := cells.dates) is not None:
        blanks = cells.filled if cells.absent else "refuse"
        days = [Reading("train on the day", Date(format=form, blanks=blanks)) for form in forms]
        rewrite = Reading('write them in one form, and set kind = "date" with its format, as in strptime')
        seen = f"holds dates {cells.within()}" if forms else "holds dates in no single known form"
        if forms and "%y" in forms[0]:
            late = [word for word in cells.words if datetime.strptime(word, forms[0]).date() > date.today()]
            seen += "; years 69 to 99 become 19xx, and 00 to 68 20xx"
            seen += f", after today {cells.within(late)}" if late else ""
            days = [rewrite, *days] if late else days
        yield Doubt(seen, (*days, LEFT_OUT) if forms else (LEFT_OUT, rewrite))
    each, named = cells.differing == cells.rows, is_name_of_ids(cells.name, cells.differing, cells.rows)
    if cells.whole and (named or (each and cells.rows >= FEW_ROWS)) and not are_years(cells.name, cells.values):
        seen = f"{'all' if each else cells.differing} values differ {cells.within()}"
        ids = Drop() if cells.absent else Id() if each else Grouping()
        shown = cells.rows >= LEAST_SHOWN * cells.differing  # the words of few rows are cells
        other = cells.worded("words")[-1] if shown else LISTED
        if cells.numbers is not None:
            other = Reading("numbers", cells.number)
        evidence = f"looks like ids or row numbers{', as its name says' if named else ''}, and {seen}"
        key = "id-column" if isinstance(ids, Id) else ""
        yield Doubt(evidence, (Reading("ids, which no model should see", ids, key), other))
    yield from _of_codes(cells)
    if cells.numbers is None and cells.many:
        seen = f"has {len(cells.words)} different words {cells.within()}, too many to be categories"
        yield Doubt(seen, (LEFT_OUT, LISTED))
    yield from _of_spellings(cells)
    yield from _of_no_values(cells)


def _of_marks(cells: Cells) -> Iterator[Doubt]:
    """Ask about marks between thousands, and signs and units beside numbers."""
    decimal = cells.form.decimal
    if cells.column.dtype.kind == "O" and (number := as_written(cells.words, decimal)) is not None:
        mark, number = number.thousands, number.model_copy(update={"blanks": cells.number.blanks})
        others = cells.worded("words")
        if mark in (decimal, ","):
            others = (Reading('fractions, for which set decimal = ","'),)
        if mark == decimal:
            others = (Reading("fractions", cells.number),)
        odd = [word for word in cells.words if (number.unit or mark or "") in word]
        seen = "a sign or unit beside numbers" if number.unit else "a comma or other mark before three digits"
        read = Reading("marks between thousands" if mark else "numbers", number)
        if mark == decimal == ",":
            read, others = others[0], (Reading('marks between thousands, for which set decimal = "."'),)
        yield Doubt(f"has {seen} {cells.within(odd)}", (read, *others))


def _of_mixture(cells: Cells) -> Iterator[Doubt]:
    """Ask about numbers and words in one column, or numbers with < or a decimal comma."""
    decimal, words = cells.form.decimal, np.array(cells.words, object)
    bare = np.array([word.lstrip("<>= ") for word in cells.words], object)
    kinds = [are_numbers(words, decimal), are_numbers(words, ","), are_numbers(bare, decimal)]
    if cells.numbers is not None or not any(kind.any() for kind in kinds):
        return
    odd, number = [str(word) for word in words[~kinds[0]]], cells.number
    categories = cells.worded("categories")
    readings = (*categories, Reading("numbers, once the rest is fixed"))
    if odd and all(CENSORED.match(word) for word in odd):
        half, limit = (number.model_copy(update={"censored": how}) for how in ("half", "limit"))
        readings = (Reading("half of a limit", half), Reading("the limit", limit))
    elif 0 < len(odd) <= MOST_ODD and not kinds[1][~kinds[0]].any():
        none = number.model_copy(update={"absent": tuple(odd), "blanks": cells.filled})
        numbers = Reading("numbers, and words for no value", none)
        known = cells.many or all(word.lower() in _PLACEHOLDERS for word in odd)
        readings = (numbers, *categories) if known or len(words) > MOST_NUMBERS else (*categories, numbers)
    seen = f"holds numbers, and {cells.within(odd)} something else"
    yield Doubt(f"{seen}; {not_numbers(words[~kinds[0]], decimal)}", readings)


def _of_codes(cells: Cells) -> Iterator[Doubt]:
    if cells.numbers is not None and ((coded := with_leading_zero(cells.words)) or is_name_of_codes(cells.name)):
        seen = "has numbers that begin with a zero" if coded else "holds codes, as its name says,"
        seen = f"{seen} {cells.within(coded or None)}"
        yield Doubt(seen, (*cells.worded("codes"), Reading("numbers", cells.number)))


def _of_spellings(cells: Cells) -> Iterator[Doubt]:
    if cells.numbers is None and not cells.many and (spelled := spellings(cells.words, cells.counts)):
        words = tuple(word for word in cells.words if word not in spelled)
        seen = f"has words {cells.within(spelled)} that differ from others by capitals alone or are short for them"
        alike = Reading("spellings", cells.categories(words, spelled))
        yield Doubt(seen, (alike, *cells.worded("other words")))


def _of_no_values(cells: Cells) -> Iterator[Doubt]:
    if cells.numbers is None:
        return
    codes, zeros = stand_for_none(cells.values), int((cells.numbers == 0).sum())
    if codes or lone_zero(cells.values, zeros, cells.rows):
        count = int(np.isin(cells.numbers, codes or [0.0]).sum())
        none = cells.number.model_copy(update={"absent": tuple(codes or [0.0]), "blanks": cells.filled})
        seen = f"has numbers in {count} of {cells.rows} rows far from all others, such as codes for absent values"
        yield Doubt(seen, (Reading("no value", none), Reading("numbers", cells.number)))


def of_leak(cells: Cells, outcome: Cells) -> str | None:
    """Return how a column reveals the target: values of one class each, or thresholds that separate classes."""
    if not 1 < outcome.differing <= MOST_NUMBERS:
        return None
    few, rows = cells.differing <= MOST_NUMBERS, outcome.there
    classes = outcome.places[rows]
    kinds, sizes = (cells.places if few else cells.there)[rows], np.sort(np.bincount(classes))
    values, everywhere = len(np.unique(kinds)), f"in {len(classes)} of {len(classes)} rows"
    chance = sizes[-2] < LEAST_SHOWN or values * LEAST_SHOWN > len(classes)
    if not chance and len(np.unique(kinds * len(sizes) + classes)) == values:
        what = f"each of its {values} values" if few else "whether it has a value"
        return f"tells the target: {what} goes with one class alone {everywhere}"
    if cells.numbers is None or few or cells.absent or math.comb(len(classes), int(sizes[-1])) < MOST_ORDERS:
        return None
    of_classes = [cells.numbers[rows][classes == place] for place in np.unique(classes)]
    ends = sorted((numbers.min(), numbers.max()) for numbers in of_classes)
    if any(below[1] >= above[0] for below, above in itertools.pairwise(ends)):
        return None
    return f"tells the target: each class has a range of its numbers for itself {everywhere}"


def of_target(cells: Cells) -> Iterator[Doubt]:
    """Ask about a target, and first about its absent values."""
    first = next(_of_outcome(cells), None)
    if not cells.absent:
        yield from [] if first is None else [first]
        return
    lacking = f"lacks values in {cells.absent} of {len(cells.column)} rows"
    seen = f"{lacking}; remove those rows, as a target cannot be filled in"
    then = Reading("then", Target() if is_amount(cells) else cells.target)
    yield Doubt(seen, (then,)) if first is None else Doubt(f"{seen}; it {first.evidence}", first.readings)


def _of_outcome(cells: Cells) -> Iterator[Doubt]:
    other, classes, task = Reading(OTHER_TARGET, Drop()), Reading("classes", cells.target), cells.hints.task
    if cells.differing < 2:
        seen = "has the same value in every row; expected two classes or more"
        yield Doubt(seen, (other, Reading("add rows of other classes")))
    if np.isinf(cells.values).any():
        yield Doubt("infinite in some rows; remove or fix them")
    if cells.dates is not None:
        yield Doubt(f"holds dates {cells.within()}", (other, LIST_CLASSES))
    if cells.numbers is None and task == "regression":
        reason = not_numbers(np.array(cells.words, object), cells.form.decimal)
        yield Doubt(f"holds words where a regression needs numbers; {reason}")
    for doubt in (*_of_marks(cells), *_of_mixture(cells)):
        read = Reading("fractions", Target()) if cells.numbers is not None else other if cells.many else classes
        yield Doubt(doubt.evidence, (read, Reading("numbers, once they are written as such")))
    for doubt in _of_codes(cells) if task is None and not cells.many else ():
        yield Doubt(doubt.evidence, (classes, AMOUNTS))
    if task is None and is_amount(cells) and cells.whole and cells.differing == 2:  # as pandas writes 0 and 1
        yield Doubt(f"holds two whole numbers, written as fractions {cells.within()}", (classes, AMOUNTS))
    for doubt in _of_spellings(cells):
        words, spelled = (getattr(doubt.readings[0].column, key) for key in ("categories", "spellings"))
        reading = other if len(words) < 2 else Reading("spellings", Target(classes=words, spellings=spelled))
        yield Doubt(doubt.evidence, (reading, classes))
    unknown = [
        word for word in cells.words if word.lower() in _PLACEHOLDERS and (word != "-" or "+" not in cells.words)
    ]
    if cells.numbers is None and unknown:
        seen = f"has a word such as `unknown` {cells.within(unknown)}, which is no outcome"
        yield Doubt(seen, (classes, Reading("remove those rows")))
    yield from _of_many(cells)
    for doubt in _of_no_values(cells) if is_amount(cells) else ():
        yield Doubt(doubt.evidence, (Reading("amounts", Target()), Reading("no value: remove those rows")))
    rare = [word for word in cells.words if cells.counts[word] < RARE * cells.rows]
    counted = cells.numbers is not None and cells.hints.task is None  # such as visits, of which most numbers are rare
    some = 0 < len(rare) <= (cells.differing if counted else cells.differing / 2)
    if not is_amount(cells) and cells.rows >= FEW_ROWS and some and cells.differing > 2:
        seen = f"has {len(rare)} of its {cells.differing} values {cells.within(rare)} only"
        yield Doubt(seen, (classes, FIX, *([] if cells.numbers is None else [AMOUNTS])))


def _of_many(cells: Cells) -> Iterator[Doubt]:
    """Ask about ages, amounts, ids and free text as targets, of which each would be a class."""
    count = cells.differing
    each = count > 3 and count > cells.rows / 2
    if cells.numbers is None and (cells.many or each):
        seen = f"has {count} different words {cells.within()}, too many to be classes"
        yield Doubt(seen, (Reading(f"ids or free text: {OTHER_TARGET}", Drop()), LIST_CLASSES))
    elif (
        cells.numbers is not None
        and cells.hints.task is None
        and not is_amount(cells)
        and (count > MOST_NUMBERS or each)
    ):
        ids = Reading(f"ids: {OTHER_TARGET}", Drop())
        readings = (ids, AMOUNTS) if is_name_of_ids(cells.name, count, cells.rows) else (AMOUNTS, LIST_CLASSES, ids)
        yield Doubt(f"has {count} different whole numbers {cells.within()}", readings)


def _place(word: str) -> tuple[float, str]:
    """Return a sorting key: numbers as numbers, then words as words."""
    try:
        return (float(word), "")
    except ValueError:
        return (np.inf, word)


def absent_in(column: Column) -> NDArray[np.bool_]:
    """Return which rows have no value, bool[rows]."""
    if column.dtype.kind == "O":
        return np.asarray(column == "", np.bool_)
    return np.isnat(column) if column.dtype.kind == "M" else np.isnan(column)


def plain_form(column: ColumnKind) -> dict[str, Any]:
    """Return a column as its keys in schema.toml, without those at their default."""
    return {"kind": column.kind} | column.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def toml_lines(plain: Mapping[str, Any]) -> list[str]:
    """Return keys as lines of TOML, one line each if lists and tables fit."""
    lines = list[str]()
    for key, value in plain.items():
        line = tomli_w.dumps({key: value}).strip()
        if isinstance(value, dict):
            line = f"{key} = {{ {', '.join(toml_lines(value))} }}"
        elif isinstance(value, list):
            items = ", ".join(tomli_w.dumps({"x": part}).strip().removeprefix("x = ") for part in value)
            line = line if len(items) > LINE else f"{key} = [{items}]"
        lines += line.splitlines()
    return lines


def _has_words(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, str) for item in value))
