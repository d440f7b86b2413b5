"""What the columns of a table probably mean, where no schema says so.

`propose` makes the best guess at every column, with a doubt where it cannot be sure: `moretta schema init` writes both
down for somebody to decide. `infer` takes the guesses for a run, and refuses the first doubt. No cell is ever quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
import tomli_w
from numpy.typing import NDArray

from moretta.data.tables.files import Column, Columns, Format, are_numbers, as_numbers
from moretta.data.tables.rows import hint_of, not_numbers, words_of
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

MOST_CATEGORIES = 30  # and in more than a tenth of the rows: probably names or free text
RARE = 0.02  # of the rows: less is no class that anybody expects among three or more
FEW_ROWS = 10  # below, nothing is told from how often a value occurs
_BLANKS: Mapping[Missing, Blanks] = {"error": "refuse", "mean": "mean", "median": "median", "indicator": "indicator"}
_NUMBERED = r"[_\W]?(id|no|nr|number|key|[0-9])"
_IDENTIFIES = re.compile(
    rf"(^|[_\W])((id|ids|mrn|ssn|uuid|guid|pid|nhs|patient|subject|case)({_NUMBERED})?"
    rf"|(record|hospital|account|visit|encounter|admission|person|member|customer){_NUMBERED})$"
)
_CAMEL = re.compile(r"[a-z](Id|ID|No|Nr)$")
_PLACEHOLDERS = frozenset(
    {"unknown", "n/a", "none", "missing", "unk", "-", "--", ".", "null", "tbd", "nil", "undefined"}
)
_DAYS = (
    *("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y"),
    *("%y-%m-%d", "%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%y/%m/%d", "%d-%m-%y", "%m-%d-%y"),
)
_TIMES = (
    *("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f"),
    *("T%H:%M", "T%H:%M:%S", "T%H:%M:%S.%f", "T%H:%MZ", "T%H:%M:%SZ", "T%H:%M:%S.%fZ"),
)
_DATES = tuple(day + time for day in _DAYS for time in _TIMES)
_DATE_LIKE = re.compile(r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T]\d{1,2}:\d{2}.*)?$")


_NO_FORM = (
    "holds dates of no one form that is known here; write them in one way, and say in a schema "
    'kind = "date" with its format, as of strptime, or kind = "drop"'
)
MEDIAN = (
    "lacks values, and a median is counted within a range, which a schema declares (moretta schema init FILE); give "
    'one, or set missing = "mean"'
)

YES_NO = ("no", "yes")


@dataclass(frozen=True)
class Guess:
    """What a column probably is. doubt: what is not sure, and the remedy; empty where nothing is."""

    column: ColumnKind
    doubt: str = ""


@dataclass(frozen=True)
class Hints:
    """What is known without a schema. target: its name, None for the last column. id_column: its name, if any."""

    target: str | None = None
    task: Task | None = None
    id_column: str | None = None
    encoding: Encoding = "one-hot"
    missing: Missing = "error"
    drop: tuple[str, ...] = ()


def infer(columns: Columns, wanted: Hints, where: str, form: Format) -> Schema:
    """Return the schema of a file that has none. where: the file, which begins the sentence of an error.

    Raises `moretta.errors.ParameterError`, with the remedy, for what cannot be known for sure.
    """
    guesses = propose(columns, wanted, where, form)
    for name, guess in guesses.items():
        if guess.doubt:
            raise ParameterError(f"{where}: column {name!r} {guess.doubt}")
    blank = {name: int(_absent(columns[name]).sum()) for name, guess in guesses.items() if _refuses_blanks(guess)}
    lacking = {name: count for name, count in blank.items() if count}
    if lacking:
        raise ParameterError(_lacking(where, lacking, len(next(iter(columns.values()))), wanted))
    return Schema(columns={name: guess.column for name, guess in guesses.items()})


def propose(columns: Columns, wanted: Hints, where: str, form: Format) -> dict[str, Guess]:
    """Return the best guess at each column, in the file's order.

    Raises `moretta.errors.ParameterError` for a target or an id column that the file does not have.
    """
    target = wanted.target or list(columns)[-1]
    for key, name in (("the target", wanted.target), ("id-column", wanted.id_column)):
        if name is not None and name not in columns:
            raise ParameterError(f'{where} has no column "{name}" for {key}; {hint_of(name, columns)}')
    if target == wanted.id_column:
        which = "the last column, and so the target as none is named" if wanted.target is None else "the target too"
        raise ParameterError(f'{where}: id-column "{target}" is {which}; name another column as target')
    if not [name for name in columns if name not in (target, wanted.id_column, *wanted.drop)]:
        raise ParameterError(f"{where} has no column beside the target {target!r}; expected at least one")
    return {name: _guess(name, column, name == target, wanted, form) for name, column in columns.items()}


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
    guess = _target(columns[names[-1]], wanted, form)
    if guess.doubt:
        raise ParameterError(f"{where}: column {names[-1]!r} {guess.doubt}")
    kinds: dict[str | None, ColumnKind] = {"file": File(), wanted.id_column: Id(), group_column: Grouping()}
    kinds[names[-1]] = guess.column
    return Schema(columns={name: kinds.get(name, Drop()) for name in columns})


def _guess(name: str, column: Column, is_target: bool, wanted: Hints, form: Format) -> Guess:
    if name == wanted.id_column:
        return Guess(Id())
    if name in wanted.drop:
        return Guess(Drop())
    if is_target:
        return _target(column, wanted, form)
    if _absent(column).all():
        return Guess(Drop(), 'has no value at all; say kind = "drop" in a schema, or fill it in')
    if column.dtype.kind == "M":
        return Guess(Date(), _a_date(("%Y-%m-%d",)))
    numbers = column if column.dtype.kind == "f" else as_numbers(column, form.decimal)
    return _of_words(name, column, wanted, form) if numbers is None else _of_numbers(name, numbers, wanted)


def _of_numbers(name: str, numbers: NDArray[np.float64], wanted: Hints) -> Guess:
    there = numbers[~np.isnan(numbers)]
    if _are_days(there):
        return Guess(Date(format="%Y%m%d"), _a_date(("%Y%m%d",)))
    if _looks_like_ids(name, there, whole=bool((there == np.round(there)).all())):
        return Guess(_whose(there), _an_id(there))
    blanks = _BLANKS[wanted.missing] if np.isnan(numbers).any() else "refuse"
    return Guess(Number(), MEDIAN) if blanks == "median" else Guess(Number(blanks=blanks))


def _of_words(name: str, column: Column, wanted: Hints, form: Format) -> Guess:
    there = column[column != ""]
    if doubt := _mixed(there, form):
        return Guess(Number(), doubt)
    if (found := _date_formats(there)) is not None:
        return Guess(Date(format=found[0]), _a_date(found)) if found else Guess(Drop(), _NO_FORM)
    distinct = np.unique(there.astype(str))
    if _looks_like_ids(name, there, whole=True):
        return Guess(_whose(there), _an_id(there))
    if len(distinct) > MOST_CATEGORIES and len(distinct) > len(there) / 10:
        return Guess(
            Drop(),
            f"has {len(distinct)} different words in {len(there)} rows, too many to be categories; remove it, or say "
            'in a schema what it is (moretta schema init): kind = "drop", "id", or "category" with its categories',
        )
    words = tuple(str(word) for word in distinct)
    blank = bool((column == "").any())
    if len(words) > 1 and (wanted.encoding == "ordinal" or (wanted.encoding == "yes-no" and words == YES_NO)):
        how: Blanks = _BLANKS[wanted.missing] if blank else "refuse"
        return Guess(Ordered(categories=words, blanks=how))
    return Guess(Category(categories=words, blanks="category" if blank and wanted.missing != "error" else "refuse"))


def _target(column: Column, wanted: Hints, form: Format) -> Guess:
    if blank := int(_absent(column).sum()):
        said = f"is the target and lacks values in {blank} of {len(column)} rows"
        return Guess(Target(), f"{said}; remove those rows, as a target cannot be filled in")
    if column.dtype.kind == "M":
        return Guess(Target(), "is the target and holds dates; name another column as target")
    numbers = column if column.dtype.kind == "f" else as_numbers(column, form.decimal)
    if numbers is None:
        return _word_target(column, wanted, form)
    if np.isinf(numbers).any():
        return Guess(Target(), "is the target and infinite in some rows; remove or mend them")
    written_whole = column.dtype.kind == "f" or not any(mark in str(cell) for cell in column for mark in ".,eE")
    there = numbers[~np.isnan(numbers)]
    whole = wanted.task == "classification" or written_whole
    if wanted.task == "regression" or not whole or (there != np.round(there)).any():
        return Guess(Target())
    return _classes(words_of(numbers))


def _word_target(column: Column, wanted: Hints, form: Format) -> Guess:
    there = column[column != ""]
    if wanted.task == "regression":
        return Guess(Target(), f"is the target of a regression and holds words; {not_numbers(there, form.decimal)}")
    if doubt := _mixed(there, form):
        return Guess(Target(), f"is the target and {doubt}")
    words = np.unique(there.astype(str)).tolist()
    if len({word.casefold() for word in words}) < len(words):
        return Guess(
            _as_target(there),
            "is the target and has words that differ by capitals alone; write each class in one way, or say in a "
            "schema that they are different classes",
        )
    if {word.lower() for word in words} & _PLACEHOLDERS:
        return Guess(
            _as_target(there),
            "is the target and has rows with a word such as `unknown`, which is no outcome; remove those rows, or say "
            "in a schema that it is a class",
        )
    return _classes(column)


def _classes(words: Column) -> Guess:
    there = words[words != ""]
    found, counts = np.unique(there.astype(str), return_counts=True)
    target = _as_target(there)
    if len(found) < 2:
        return Guess(target, "is the target and has the same value in every row; expected two classes or more")
    rare = counts < RARE * len(there)
    if len(found) > 2 and len(there) >= FEW_ROWS and rare.any() and not rare.all() and rare.sum() <= len(found) / 2:
        return Guess(
            target,
            f"is the target, and {int(rare.sum())} of its {len(found)} values are in {int(counts[rare].sum())} of "
            f"{len(there)} rows only; mend those rows, or list all classes in a schema; if they are amounts, set "
            'task = "regression"',
        )
    return Guess(target)


def _as_target(there: Column) -> Target:
    words = sorted({str(word) for word in there}, key=_place)
    return Target(classes=tuple(words) if len(words) > 1 else ())


def _place(word: str) -> tuple[float, str]:
    """Return a key by which numbers are sorted as numbers, and words behind them as words."""
    try:
        return (float(word), "")
    except ValueError:
        return (np.inf, word)


def _mixed(there: Column, form: Format) -> str:
    """Return the doubt about a column that holds numbers and words."""
    numbers = are_numbers(there, form.decimal)
    with_comma = are_numbers(there, ",") if form.decimal == "." else numbers
    censored = are_numbers(np.array([str(cell).lstrip("<>= ") for cell in there], object), form.decimal) & ~numbers
    if not numbers.any() and not with_comma.any() and not censored.any():
        return ""
    wrong = there[~numbers]
    return (
        f"holds numbers, and in {len(wrong)} of {len(there)} rows something else; {not_numbers(wrong, form.decimal)}; "
        'if they are categories, say so in a schema by kind = "category"'
    )


def _date_formats(there: Column) -> tuple[str, ...] | None:
    """Return the formats that all words fit, none of ours perhaps; None where they are no dates."""
    texts = [str(word) for word in np.unique(there.astype(str))]
    if not texts or sum(_DATE_LIKE.match(text) is not None for text in texts) < 0.9 * len(texts):
        return None
    return tuple(form for form in _DATES if all(_fits(text, form) for text in texts))


def _fits(text: str, form: str) -> bool:
    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def _are_days(there: NDArray[np.float64]) -> bool:
    """Whether whole numbers are all days such as 20240131."""
    distinct = np.unique(there)
    if len(there) < FEW_ROWS or len(distinct) < 3 or distinct[0] < 19000101 or distinct[-1] > 21001231:
        return False
    return all(number == int(number) and _fits(str(int(number)), "%Y%m%d") for number in distinct)


def _looks_like_ids(name: str, there: Column, *, whole: bool) -> bool:
    count, distinct = len(there), len(np.unique(there.astype(str)))
    if not whole or distinct < 3:
        return False
    if _IDENTIFIES.search(name.lower()) or _CAMEL.search(name):
        return True
    if count < FEW_ROWS or distinct < count:
        return False
    if there.dtype.kind != "f":
        return True
    # As rows are numbered, or as long numbers of equal length that all differ.
    numbered = there[0] in (0, 1) and bool((np.diff(there.astype(np.float64)) == 1).all())
    least, most = float(there.min()), float(there.max())
    return numbered or (least >= 10_000 and len(f"{least:.0f}") == len(f"{most:.0f}"))


def _whose(there: Column) -> Id | Grouping:
    return Id() if len(np.unique(there.astype(str))) == len(there) else Grouping()


def _an_id(there: Column) -> str:
    kind = "id" if isinstance(_whose(there), Id) else "group"
    return (
        f'looks like ids, which no model should see; name it by id-column, or say in a schema kind = "{kind}" (moretta '
        "schema init FILE), or remove it"
    )


def _a_date(forms: tuple[str, ...]) -> str:
    fit = " or ".join(f'"{form}"' for form in forms)
    return (
        f'holds dates; say in a schema kind = "date" with format = {fit} to train on the day, or kind = "drop" '
        "(moretta schema init FILE)"
    )


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
    """Return guesses as schema.toml, each doubt as a comment above its column."""
    parts = []
    for name, guess in guesses.items():
        plain = {"kind": guess.column.kind} | guess.column.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        text = tomli_w.dumps({"columns": {name: plain}})
        if guess.doubt:  # and nothing loads it before somebody has
            text = f"# decide: it {guess.doubt}\n" + text.replace(
                f'kind = "{guess.column.kind}"', f'kind = "decide"  # perhaps "{guess.column.kind}"', 1
            )
        parts.append(text)
    return "\n".join(parts)


def _listed(words: tuple[str, ...], between: str = ", ") -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return between.join(words[:MOST]) + more
