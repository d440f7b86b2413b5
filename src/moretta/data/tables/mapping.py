"""The changes that a site makes to its own tables before a schema reads them: [mapping] of silo.toml.

A recoded column may hold only the words on either side of its table. A forgotten word is refused here, because the
schema might take it for a blank. `[data] absent` lists the words and numbers that stand for no value, in the file's own
unit. The mapping stays at the site: a server sees the same as if the file had been written so.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from moretta.contract.settings import Positive, Section, Words
from moretta.data.tables.files import Column, Columns, Format, are_numbers, as_numbers, read_columns
from moretta.data.tables.rows import CENSORED, WrongRows, bare, hint_of, plain_number, refuse, words_of
from moretta.data.tables.schema import Finite, Mark, Number
from moretta.errors import ParameterError


class Conversion(Section):
    """Convert numbers into the schema's unit: number * factor + offset, also behind < and >.

    Args:
        factor: multiplies a number first.
        offset: is added to the product.
        unit: a text that cells of the file may begin or end with, such as "umol/l" in 88 umol/l.
        thousands: the mark between thousands in the file, as in 1,234.
    """

    factor: Positive = 1.0
    offset: Finite = 0.0
    unit: str = ""
    thousands: Mark | None = None


class ColumnMapping(Section):
    """Change the columns of the site's tables, also of rows held back, before the schema reads them.

    Every key names columns as the file does.

    Args:
        drop: columns that are not read.
        rename: the schema's names of columns.
        recode: for a column, each word and the schema's word for it. An empty word is no value; other words are
            refused.
        units: for a column of numbers, the conversion into the schema's unit.
    """

    drop: tuple[Words, ...] = ()
    rename: dict[Words, Words] = {}  # noqa: RUF012  # pydantic copies it
    recode: dict[Words, dict[Words, str]] = {}  # noqa: RUF012
    units: dict[Words, Conversion] = {}  # noqa: RUF012

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if dropped := [name for name in self.drop if name in {*self.rename, *self.recode, *self.units}]:
            raise ParameterError(
                f"[mapping] drop: {dropped[0]!r} is also mapped; remove it from drop, or from the mapping"
            )
        if both := [name for name in self.units if name in self.recode]:
            raise ParameterError(
                f"[mapping] units: {both[0]!r} is also recoded; recode words or convert numbers, and remove the other"
            )
        targets = list(self.rename.values())
        if twice := [name for name in targets if targets.count(name) > 1]:
            raise ParameterError(
                f"[mapping.rename] renames two columns to {twice[0]!r}; expected each name once: drop one of them"
            )
        return self

    def unread(self, dropped: Collection[str]) -> set[str]:
        """Return the file's columns whose cells need not be read. dropped: the schema's dropped columns."""
        kept = {name for name in dropped if name not in self.rename}
        return {*self.drop, *kept, *(old for old, new in self.rename.items() if new in dropped)}

    def read(
        self, path: Path, form: Format | None, where: str, dropped: Collection[str] = ()
    ) -> "tuple[dict[str, Column], MappingEffect]":
        """Return a file's columns as the schema reads them, and the effect.

        Args:
            dropped: The schema's dropped columns.

        Raises:
            ParameterError: As `applied` and `moretta.data.tables.files.read_columns`.
        """
        return self.applied(read_columns(path, form, self.unread(dropped)), where, form)

    def fitting(
        self, columns: Columns, where: str, form: Format | None
    ) -> tuple[dict[str, Column], Mapping[int, str], NDArray[np.intp]]:
        """Apply the mapping to rows to predict; return the columns, the rows that do not fit and why, and the rest.

        Rows have their numbers in the file, from 1. Mapped columns may be missing, such as a target.

        Raises:
            ParameterError: No row fits; as `applied`.
        """
        there = {
            key: {name: value for name, value in getattr(self, key).items() if name in columns}
            for key in ("rename", "recode", "units")
        }
        mapping = self.model_copy(update={"drop": tuple(name for name in self.drop if name in columns), **there})
        rows, left_out = np.arange(len(next(iter(columns.values())))), dict[int, str]()
        while True:
            try:
                mapped, _ = mapping.applied({name: column[rows] for name, column in columns.items()}, where, form)
                return mapped, left_out, rows + 1
            except WrongRows as error:
                left_out |= {int(row) + 1: error.what for row in rows[error.wrong]}
                rows = rows[~error.wrong]
                if not len(rows):
                    raise

    def applied(self, columns: Columns, where: str, form: Format | None) -> "tuple[dict[str, Column], MappingEffect]":
        """Return a file's columns as the schema reads them, and the effect as counts.

        Args:
            where: The file or site, which begins each error's sentence.
            form: The form of a .csv file.

        Raises:
            ParameterError: A column is missing, a word is not mapped, cells with a unit are not numbers, or two columns
                get one name. The sentence quotes no cell.
        """
        for name in (*self.drop, *self.rename, *self.recode, *self.units):
            if name not in columns:
                raise ParameterError(
                    f"{where}: [mapping] of silo.toml names a column {name!r}, which is not among its {len(columns)}; "
                    f"{hint_of(name, columns)}"
                )
        mapped = {name: column for name, column in columns.items() if name not in self.drop}
        effect = MappingEffect(len(next(iter(columns.values()))), len(self.rename), len(self.drop))
        for name, words in self.recode.items():
            mapped[name], effect.recoded[name] = _recoded(mapped[name], words, f"{where}: ", name)
        for name, conversion in self.units.items():
            opening = f"[mapping.units] converts column {name!r}, which has "
            mapped[name], effect.converted[name] = _converted(
                mapped[name], conversion, f"{where}: ", opening, form or Format()
            )
        renamed = dict[str, Column]()
        for old, column in mapped.items():
            name = self.rename.get(old, old)
            if name in renamed:
                raise ParameterError(
                    f"{where}: [mapping.rename] of silo.toml makes a second column {name!r}; drop or rename the other"
                )
            renamed[name] = column
        return renamed, effect


@dataclass(frozen=True)
class MappingEffect:
    """The effect of a mapping on a file.

    Attributes:
        rows: The number of the file's rows.
        renamed, dropped: Numbers of columns.
        recoded, converted: Numbers of cells, by column.
    """

    rows: int
    renamed: int
    dropped: int
    recoded: dict[str, int] = field(default_factory=dict)
    converted: dict[str, int] = field(default_factory=dict)

    def sentence(self) -> str:
        """Return it as the end of a sentence."""
        parts = [f"{self.renamed} columns renamed", f"{self.dropped} dropped"]
        for what, counts in (("recoded", self.recoded), ("converted", self.converted)):
            each = ", ".join(f"{name} {count}" for name, count in counts.items())
            parts.append(f"{sum(counts.values())} cells {what}{f' ({each})' if each else ''}")
        return f"of {self.rows} rows: {', '.join(parts)}"


def _recoded(column: Column, table: Mapping[str, str], where: str, name: str) -> tuple[Column, int]:
    """Return a column's words after recoding, and the number of changed cells."""
    distinct, which = np.unique(words_of(column).astype(str), return_inverse=True)
    known = {"": "", **{word: word for word in table.values()}, **table}
    words = [str(word) for word in distinct]
    became = [known.get(word, known.get(plain_number(word))) for word in words]
    refuse(
        np.array([word is None for word in became])[which],
        f"column {name!r} has a word that [mapping.recode.{name}] of silo.toml does not map",
        'add it there, as itself where it stays, or as "" where it is no value',
        where,
    )
    changed = np.array([old != new for old, new in zip(words, became, strict=True)])
    return np.array(became, object)[which], int(changed[which].sum())


def _converted(column: Column, conversion: Conversion, where: str, what: str, form: Format) -> tuple[Column, int]:
    """Return a column in another unit, and its count of numbers; as words only if some have < or > before them."""
    factor, offset, decimal = conversion.factor, conversion.offset, form.decimal
    if column.dtype.kind == "M":
        raise ParameterError(f"{where}{what}dates; remove it there, as dates have no unit")
    if column.dtype.kind == "f":
        return column * factor + offset, int(np.isfinite(column).sum())
    number = Number(unit=conversion.unit, thousands=conversion.thousands)
    cells = bare(column, number, decimal, where + what.removesuffix(", which has "))
    signs = [sign[0] if (sign := CENSORED.match(str(cell))) else "" for cell in cells]
    words = np.array([str(cell)[len(before) :] for cell, before in zip(cells, signs, strict=True)], object)
    refuse(
        ~are_numbers(words, decimal) & (words != ""),
        f"{what}something other than a number",
        "remove it there if the column is of words; else give unit or thousands there, as the cells have them, or list "
        "in [data] absent what stands for no value",
        where,
    )
    if (numbers := as_numbers(words, decimal)) is None:
        raise ParameterError(
            f'{where}{what}numbers with a point, and [data] decimal = ","; use one sign in the whole file'
        )
    converted, count = numbers * factor + offset, int((words != "").sum())
    if not any(signs):
        return converted, count
    written = ["" if np.isnan(number) else repr(float(number)).replace(".", decimal) for number in converted]
    return np.array([before + word for before, word in zip(signs, written, strict=True)], object), count
