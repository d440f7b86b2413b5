"""The meaning of a table's columns: `schema.toml`, as ``docs/schema.md`` shows it key by key.

The order of the columns here is that of the model's inputs, for any order in a file. Ids and groups are no inputs. A
file that ends in .json has the same content as a Table Schema (`moretta.data.tables.table_schema`).
"""

import hashlib
import json
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from moretta.contract.settings import Section, Words
from moretta.contract.wording import did_you_mean, shown
from moretta.data.tables import table_schema
from moretta.errors import ParameterError

log = logging.getLogger("moretta")

Blanks = Literal["refuse", "mean", "median", "indicator"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Measured(Section):
    """A column that becomes a number."""

    blanks: Blanks = "refuse"


Mark = Literal[",", ".", "'", " "]  # between thousands


class Number(_Measured):
    """Numbers.

    Args:
        unit: for readers; a cell may begin or end with it, as 45% does.
        range: the smallest and the largest allowed value, within which a median is counted.
        thousands: the mark between thousands, as in 1,234.
        absent: numbers and words that stand for no value, besides those of the file.
    """

    kind: Literal["number"] = "number"
    unit: str = ""
    range: tuple[Finite, Finite] | None = None
    censored: Literal["refuse", "limit", "half"] = "refuse"
    thousands: Mark | None = None
    absent: tuple[Finite | Words, ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_range(self.range)
        if self.blanks == "median" and self.range is None:
            raise ValueError('blanks = "median" needs a range; add one, for example range = [0, 120]')
        return self


class _Worded(Section):
    """A column of known words. spellings: other words that stand for one of them."""

    spellings: dict[str, str] | None = None

    def _check(self, key: str, words: Sequence[str]) -> None:
        _check_words(key, words)
        wrong = [a for a, b in (self.spellings or {}).items() if a in words or b not in words]
        if wrong:
            raise ValueError(f"spellings: expected other words, each for one of the {key}; got {shown(wrong[0])}")


class Category(_Worded):
    """Words without an order; each becomes a column of zeros and ones."""

    kind: Literal["category"] = "category"
    categories: Annotated[tuple[str, ...], Field(min_length=1)]
    blanks: Literal["refuse", "category"] = "refuse"
    unseen: Literal["refuse", "blank"] = "refuse"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check("categories", self.categories)
        if self.blanks == "category" and "missing" in self.categories:
            raise ValueError('categories: "missing" is the category of blanks = "category"; rename this one')
        if self.unseen == "blank" and self.blanks == "refuse":
            raise ValueError('unseen = "blank" needs blanks = "category", because blanks are otherwise refused; set it')
        return self


class Ordered(_Measured, _Worded):
    """Words with an order, as numbers 0, 1, ... in it."""

    kind: Literal["ordered"] = "ordered"
    categories: Annotated[tuple[str, ...], Field(min_length=2)]
    unseen: Literal["refuse", "blank"] = "refuse"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check("categories", self.categories)
        if self.unseen == "blank" and self.blanks == "refuse":
            raise ValueError('unseen = "blank" needs blanks = "mean", "median" or "indicator"')
        return self


class Date(_Measured):
    """Days. format: as for `datetime.strptime`. range: the first and the last allowed day."""

    kind: Literal["date"] = "date"
    format: Words = "%Y-%m-%d"
    range: tuple[date, date] | None = None

    @field_validator("range", mode="before")
    @classmethod
    def _are_days(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return tuple(date.fromisoformat(day) if isinstance(day, str) else day for day in value)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("range: expected the first day and a later one, for example [2020-01-01, 2024-12-31]")
        if self.blanks == "median" and self.range is None:
            raise ValueError('blanks = "median" needs a range; add one, such as range = [2020-01-01, 2024-12-31]')
        return self


class Id(Section):
    """The id of each row: not an input of the model, but kept in its predictions."""

    kind: Literal["id"] = "id"


class Grouping(Section):
    """The person or thing of rows, such as a patient with several visits; not an input of the model."""

    kind: Literal["group"] = "group"


class File(Section):
    """The path of an image below a folder; the images are the model's inputs."""

    kind: Literal["file"] = "file"


class Drop(Section):
    """A column that is not read."""

    kind: Literal["drop"] = "drop"


class Target(_Worded):
    """The column to predict.

    Args:
        classes: its words, in the order of the model's outputs; empty for numbers.
        range: of numbers.
        mask_values: for cells that are paths of masks, images with a class at each pixel: the pixel value of each
            class, in the order of the model's outputs, such as [0, 255].
        mask_ignored: the value of pixels that do not count.
    """

    kind: Literal["target"] = "target"
    classes: tuple[str, ...] = ()
    range: tuple[Finite, Finite] | None = None
    mask_values: tuple[int, ...] | None = None
    mask_ignored: int | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_range(self.range)
        values = self.mask_values or ()
        if self.mask_values is None and self.mask_ignored is not None:
            raise ValueError("mask-ignored needs mask-values, the pixel value of each class; set both")
        if self.mask_values is not None and (
            len({*values, self.mask_ignored}) < max(len(values) + 1, 3) or self.classes or self.range or self.spellings
        ):
            raise ValueError(
                "mask-values: expected two or more different numbers, mask-ignored another one, and no classes or range"
            )
        if self.classes or self.spellings:
            self._check("classes", self.classes)
        if len(self.classes) == 1:
            raise ValueError("classes: expected two or more, or none where the target is a number")
        return self


ColumnKind = Annotated[
    Number | Category | Ordered | Date | Id | Grouping | File | Target | Drop, Field(discriminator="kind")
]
Feature = Number | Category | Ordered | Date
KINDS = ("number", "category", "ordered", "date", "id", "group", "file", "target", "drop")


class Schema(Section):
    """List the columns of a table by name, in the order of the model's inputs.

    Raises:
        ParameterError: Two columns are ids, groups or targets, or none is an input.
    """

    columns: dict[str, ColumnKind]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for kind in ("id", "group", "file", "target"):
            several = [name for name, column in self.columns.items() if column.kind == kind]
            if len(several) > 1:
                raise ParameterError(f"schema: {' and '.join(several)} are both of kind {kind}; expected one")
        if not self.features and self.name_of("file") is None:
            raise ParameterError("schema: expected at least one column of kind number, category, ordered or date")
        if self.target is not None and self.target.mask_values and self.name_of("file") is None:
            raise ParameterError('schema: mask-values are for masks of images; name these in a column of kind "file"')
        if self.features and self.name_of("file") is not None:
            raise ParameterError(
                f"schema: the images that {self.name_of('file')} names are the inputs, so {next(iter(self.features))} "
                'cannot be one; set its kind to "drop", "id", "group" or "target"'
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        """Read a schema from a .toml file, or from a Table Schema in .json.

        Raises:
            ParameterError: The file is not a schema; one sentence says why.
        """
        return load(Path(path))

    @property
    def features(self) -> dict[str, Feature]:
        """The columns that become inputs of the model, in order."""
        return {n: c for n, c in self.columns.items() if isinstance(c, Number | Category | Ordered | Date)}

    def name_of(self, kind: Literal["id", "group", "file", "target"]) -> str | None:
        """Return the name of the one column of a kind, if there is one."""
        return next((name for name, column in self.columns.items() if column.kind == kind), None)

    @property
    def target(self) -> Target | None:
        """The column to predict, if the schema has one."""
        return next((column for column in self.columns.values() if isinstance(column, Target)), None)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The columns that are not read."""
        return tuple(name for name, column in self.columns.items() if column.kind == "drop")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty where the target is a number."""
        return self.target.classes if self.target else ()

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all that sites must share: names, order, kinds, categories, ranges, treatments."""
        return hashlib.sha256(json.dumps(self.plain(), ensure_ascii=False).encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Return the schema as plain values, as a TOML or JSON file has them."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=False, exclude_none=True)

    def only(self, features: Sequence[str], *, labelled: bool) -> "Schema":
        """Return the schema of a holder of some features. labelled: whether it holds the target too."""
        kept = {
            name: column
            for name, column in self.columns.items()
            if name in features
            or column.kind in ("id", "group", "file", "drop")
            or (labelled and column.kind == "target")
        }
        return self.model_copy(update={"columns": kept})


def load(path: Path) -> Schema:
    """Read a schema; a warning lists properties of a Table Schema that a schema cannot keep.

    Raises:
        ParameterError: The schema is invalid.
    """
    schema, unkept = read(path)
    if unkept:
        log.warning("%s: of this Table Schema, not kept: %s", path, "; ".join(unkept))
    return schema


def read(path: Path, target: str | None = None) -> tuple[Schema, list[str]]:
    """Read a schema as `load` does, and list what it cannot keep. target: for a Table Schema that does not name it."""
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = tomllib.loads(text) if form == "TOML" else {}
    except FileNotFoundError:
        raise ParameterError(
            f"the schema {path} does not exist; propose one by: moretta schema init FILE --out {path.stem}.toml"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError(f"{path}: this is not {form}: {str(error).splitlines()[0]:.120}") from None
    if form == "TOML":
        return of(tables, str(path)), []
    columns, unkept = table_schema.read(text, str(path), target)
    return of({"columns": columns}, str(path)), unkept


def of(tables: Mapping[str, Any], where: str = "schema") -> Schema:
    """Return the schema of plain values. where: begins the sentence of the error."""
    columns = tables.get("columns")
    if set(tables) - {"columns"} or not isinstance(columns, Mapping) or not columns:
        raise ParameterError(f'{where}: expected a section for each column, such as [columns.age] with kind = "number"')
    for name, column in columns.items():
        kind = column.get("kind") if isinstance(column, Mapping) else None
        if kind == "decide":
            raise ParameterError(
                f"{where}: [columns.{name}] is undecided; replace its lines by one reading of the comment above it"
            )
        if kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS)
            raise ParameterError(f"{where}: [columns.{name}] kind: got {shown(kind)}; {hint}")
    try:
        return Schema.model_validate_json(json.dumps({"columns": columns}, default=_plain), strict=True)
    except ValidationError as error:
        raise ParameterError(f"{where}: {_reason(error)}") from None
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def _plain(value: object) -> str:
    """Return a date of a TOML file in JSON's form."""
    if isinstance(value, date):
        return value.isoformat()[:10]
    raise ParameterError("expected numbers, strings, dates and lists")


def _reason(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    place = [str(part) for part in fault["loc"]]
    column, keys = place[1] if len(place) > 1 else "", [part for part in place[3:] if not part.isdigit()]
    message = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
    if fault["type"] == "extra_forbidden":
        message = "this key is unknown"
    return f"[columns.{column}] {' '.join(keys)}{': ' if keys else ''}{message[:1].lower()}{message[1:]}"


def _check_range(limits: tuple[float, float] | None) -> None:
    if limits is not None and not (limits[0] < limits[1] and math.isfinite(limits[1] - limits[0])):
        raise ValueError(
            "range: expected the least and the greatest value, a finite distance apart, for example [0, 120]"
        )


def _check_words(key: str, words: Sequence[str]) -> None:
    if len(set(words)) < len(words):
        raise ValueError(f"{key}: expected each entry once")
    if any(not word or word != word.strip() for word in words):
        raise ValueError(f"{key}: expected words without blanks around them, none empty")
