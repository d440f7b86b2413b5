"""Guesses at the meaning of a table's columns, without a schema.

`propose` makes the best guess at every column. An uncertain guess has a doubt: the evidence as shares and counts, and
the possible readings with their lines of schema.toml. `moretta schema init` writes both into a file for a person to
decide; `infer` takes the guesses for a run, and refuses doubts. No cell is ever quoted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tomli_w

from moretta.contract.wording import first_of
from moretta.data.tables.doubts import (
    Cells,
    Doubt,
    Hints,
    Reading,
    absent_in,
    is_amount,
    of_feature,
    of_leak,
    of_target,
    plain_form,
    toml_lines,
)
from moretta.data.tables.evidence import is_cell, is_name_of_ids
from moretta.data.tables.files import Columns, Format
from moretta.data.tables.rows import hint_of
from moretta.data.tables.schema import (
    Category,
    ColumnKind,
    Date,
    Drop,
    Feature,
    File,
    Grouping,
    Id,
    Number,
    Ordered,
    Schema,
    Target,
)
from moretta.errors import ParameterError

ID_KINDS = ("id", "group")
YES_NO = ("no", "yes")
HOW = "Answer in the schema that `moretta schema init FILE` proposes, and name it by [data] schema"
MEDIAN = (
    "lacks values, and a median needs a range, which a schema declares (moretta schema init FILE); give one, or set "
    'missing = "mean"'
)


@dataclass(frozen=True)
class Guess:
    """A guess at a column. doubt: the question about it; None for a sure guess."""

    column: ColumnKind
    doubt: Doubt | None = None


def infer(columns: Columns, hints: Hints, where: str, form: Format) -> Schema:
    """Infer the schema of a file.

    Args:
        where: The file, which begins each error's sentence.

    Raises:
        ParameterError: A guess is not sure, and the sentence asks the question; or a column lacks values.
    """
    guesses = propose(columns, hints, where, form)
    target = hints.target or list(columns)[-1]
    asked = sorted(
        (name for name, guess in guesses.items() if guess.doubt is not None), key=lambda name: name != target
    )
    doubts = [f"column {name!r} {guesses[name].doubt}" for name in asked]
    if doubts:
        more = f" (there are {len(doubts)} such questions)" if len(doubts) > 1 else ""
        how = f" {HOW}{more}" if doubts[0].endswith("?") else ""
        raise ParameterError(f"{where}: {doubts[0]}{how}")
    strict = [n for n, g in guesses.items() if g.column.kind == "id" or getattr(g.column, "blanks", "") == "refuse"]
    lacking = {name: count for name in strict if (count := int(absent_in(columns[name]).sum()))}
    if lacking:
        rows = len(next(iter(columns.values())))
        listed = ", ".join(f"column {name!r} in {count} of {rows} rows" for name, count in lacking.items())
        fill = 'fill them in, or set missing = "mean" or "indicator"'
        remedy = "give every row its id" if hints.id_column in lacking else fill
        raise ParameterError(f"{where} lacks values: {listed:.400}; {remedy}")
    if hints.missing == "median":
        for name, guess in guesses.items():
            if isinstance(guess.column, Number) and absent_in(columns[name]).any():
                raise ParameterError(f"{where}: column {name!r} {MEDIAN}")
    return Schema(columns={name: guess.column for name, guess in guesses.items()})


def propose(columns: Columns, hints: Hints, where: str, form: Format) -> dict[str, Guess]:
    """Return the best guess at each column, in the file's order.

    Raises:
        ParameterError: The file lacks the target, the id column or any input, or its first line looks like a row.
    """
    target = hints.target or list(columns)[-1]
    for key, name in (("the target", hints.target), ("id-column", hints.id_column)):
        if name is not None and name not in columns:
            raise ParameterError(f'{where} has no column "{name}" for {key}; {hint_of(name, columns)}')
    if target == hints.id_column:
        which = "the last column, which is the target by default" if hints.target is None else "the target too"
        raise ParameterError(f'{where}: id-column "{target}" is {which}; name another column as target')
    if not [name for name in columns if name not in (target, hints.id_column, *hints.drop)]:
        raise ParameterError(
            f"{where} has no column beside the target; expected at least one. Set --separator if another sign is "
            "between the cells, or add a header line if the first line is not one"
        )
    cells = {name: Cells(name, column, hints, form) for name, column in columns.items()}
    if not hints.header and not hints.known:
        _check_header(cells, where)
    guesses = {name: _guess(column, name == target) for name, column in cells.items()}
    for name, guess in guesses.items() if not hints.known else ():
        seen = of_leak(cells[name], cells[target]) if name != target and isinstance(guess.column, Feature) else None
        if seen is not None:
            known = Reading("known before it", guess.column)
            guesses[name] = Guess(Drop(), Doubt(seen, (Reading("known with it: leave it out", Drop()), known)))
    return _once(guesses, hints)


def _check_header(cells: Mapping[str, Cells], where: str) -> None:
    """Raise if the first line looks like a row. No name is quoted, as it may be a cell."""
    if any(column.numbers is not None and column.rows for column in cells.values()):
        return  # words above numbers are names
    alike = sum(is_cell(name, column.words) for name, column in cells.items())
    if alike > 1 or 2 * alike >= len(cells):
        raise ParameterError(
            f"{where}: expected a header line, but in {alike} of {len(cells)} columns the first line looks like the "
            "cells below it. If it is a row, add a line of names above it; if it has the names, run moretta schema "
            "init --header"
        )


def _once(guesses: dict[str, Guess], hints: Hints) -> dict[str, Guess]:
    """Return guesses with at most one id and one group, as schemas demand; ids by name come first."""
    taken = {"id"} if hints.id_column is not None else set[str]()
    asked = {
        name: guess for name, guess in guesses.items() if guess.doubt is not None and guess.column.kind in ID_KINDS
    }
    for name in sorted(asked, key=lambda name: is_name_of_ids(name, 3, 3), reverse=True):
        kind, doubt = guesses[name].column.kind, asked[name].doubt
        if kind in taken and doubt is not None:
            ids, other = doubt.readings
            left = Reading(ids.what, Drop())
            readings = (left, other) if is_name_of_ids(name, 3, 3) or other.column is None else (other, left)
            guesses[name] = Guess(readings[0].column or Drop(), Doubt(doubt.evidence, readings))
        taken.add(kind)
    return guesses


def infer_labels(columns: Columns, hints: Hints, group_column: str | None, where: str, form: Format) -> Schema:
    """Infer the schema of a table that names files of images in its column "file".

    Other columns than the file, the target, the ids and the groups are omitted.

    Raises:
        ParameterError: A column is missing or named twice, or the target is not sure; the sentence has the remedy.
    """
    named = {"file": "file", "id-column": hints.id_column, "group-column": group_column}
    named["the target"] = hints.target or list(columns)[-1]
    names = [name for name in named.values() if name is not None]
    for key, name in named.items():
        if name is not None and name not in columns:
            raise ParameterError(f'{where} has no column "{name}" for {key}; {hint_of(name, columns)}')
    if len(set(names)) < len(names):
        raise ParameterError(
            f'{where}: file, id-column, group-column and the target must be different columns, and "{names[-1]}" is '
            "the target; name another"
        )
    guess = _guess(Cells(names[-1], columns[names[-1]], hints, form), is_target=True)
    if guess.doubt is not None:
        raise ParameterError(f"{where}: column {names[-1]!r} {guess.doubt}")
    kinds: dict[str | None, ColumnKind] = {"file": File(), hints.id_column: Id(), group_column: Grouping()}
    kinds[names[-1]] = guess.column
    return Schema(columns={name: kinds.get(name, Drop()) for name in columns})


def _guess(cells: Cells, is_target: bool) -> Guess:
    if cells.name == cells.hints.id_column:
        return Guess(Id())
    if cells.name in cells.hints.drop:
        return Guess(Drop())
    doubts = of_target(cells) if is_target else of_feature(cells)
    doubt = None if cells.hints.known else next(doubts, None)
    if doubt is not None:
        columns = [reading.column for reading in doubt.readings if reading.column is not None]
        if is_target:
            doubt = Doubt(f"is the target and {doubt.evidence}", doubt.readings)
        return Guess(columns[0] if columns else Target() if is_target else Drop(), doubt)
    if is_target:
        return Guess(Target() if is_amount(cells) else cells.target)
    if cells.numbers is not None:
        return Guess(cells.number)
    words = tuple(cells.words)
    if len(words) > 1 and (cells.hints.encoding == "ordinal" or (cells.hints.encoding, words) == ("yes-no", YES_NO)):
        return Guess(Ordered(categories=words, blanks=cells.number.blanks))
    return Guess(cells.categories(words))


MOST = 6  # words that are listed


def lines_of(schema: Schema) -> list[str]:
    """Return a line for each kind of column: names, categories, omitted columns, and the target."""
    by_kind: dict[str, list[str]] = {}
    for name, column in schema.columns.items():
        match column:
            case Number(unit=unit):
                by_kind.setdefault("numbers", []).append(f"{name} ({unit})" if unit else name)
            case Date():
                by_kind.setdefault("dates", []).append(name)
            case Category(categories=words):
                by_kind.setdefault("categories", []).append(f"{name} ({first_of(words, MOST)})")
            case Ordered(categories=words):
                by_kind.setdefault("ordered categories", []).append(f"{name} ({first_of(words, MOST, ' < ')})")
    kinds = {"images (file)": "file", "not trained on (id)": "id", "kept together (group)": "group"}
    kinds |= {"not read (drop)": "drop"}
    for label, kind in kinds.items():
        if names := [name for name, column in schema.columns.items() if column.kind == kind]:
            by_kind[label] = names
    lines = [f"{label}: {', '.join(names)}" for label, names in by_kind.items()]
    target = schema.name_of("target")
    if target is not None:
        classes = schema.classes and f"classes {first_of(schema.classes, MOST)}"
        lines.append(f"target: {target}, {classes or 'a number'}")
    return lines


def as_toml(guesses: Mapping[str, Guess]) -> str:
    """Return guesses as schema.toml, each doubt as a comment above its column, with the lines that resolve it."""
    parts = []
    for name, guess in guesses.items():
        text = "\n".join([tomli_w.dumps({"columns": {name: {}}}).strip(), *toml_lines(plain_form(guess.column)), ""])
        if guess.doubt is not None:  # nothing loads it before a person has decided
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
        lines += [] if reading.column is None else [f"    {line}" for line in toml_lines(plain_form(reading.column))]
    return "".join(f"# {line}\n" for line in lines)
