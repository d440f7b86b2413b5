"""Table Schema (https://datapackage.org/standard/table-schema): another way to write a schema, in JSON.

read(text, ...)   -> columns, unkept   each column as in schema.toml, and the properties that it cannot keep
written(columns)  -> text              a field's own property `moretta` keeps what Table Schema cannot
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from moretta.data.tables.files import ABSENT
from moretta.errors import ParameterError

PROFILE = "https://datapackage.org/profiles/2.1/tableschema.json"
Columns = dict[str, dict[str, Any]]
Some = Annotated[tuple[str, ...], Field(min_length=1)]
_MARKS = (",", ".", "'", " ")
_DATES = {"date": "%Y-%m-%d", "datetime": "%Y-%m-%dT%H:%M:%S", "yearmonth": "%Y-%m"}
_LIMITS = {"constraints.minimum", "constraints.maximum"}


class _Descriptor(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, alias_generator=to_camel)

    def stated(self, *silent: str) -> list[str]:
        """Return the names of its properties that are set."""
        return [name for name in self.model_dump(by_alias=True, exclude_defaults=True) if name not in silent]


class _Value(_Descriptor):
    """One of the categories or of the missing values, which may have a label."""

    value: str | int


Values = tuple[str | int | _Value, ...]


class _Constraints(_Descriptor):
    required: bool = False
    minimum: float | str | None = None
    maximum: float | str | None = None
    enum: tuple[str | int | float | bool, ...] = ()


class _Field(_Descriptor):
    name: Annotated[str, Field(min_length=1)]
    type: str = "any"
    format: str = "default"
    constraints: _Constraints = _Constraints()
    categories: Values = ()
    categories_ordered: bool = False
    missing_values: Values | None = None
    group_char: str | None = None
    bare_number: bool = True
    decimal_char: str = "."
    true_values: Some = ("true", "True", "TRUE", "1")
    false_values: Some = ("false", "False", "FALSE", "0")
    moretta: dict[str, Any] = {}  # pydantic copies it

    def column(self, kind: str | None, missing: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the keys of schema.toml, and properties that they lose. missing: the table's words for no value."""
        words, limits, kept = self._words(), self.constraints, set[str]()
        kind = kind or self._kind(words)
        column: dict[str, Any] = {"kind": kind}
        if words and kind in ("category", "ordered", "target"):
            column["classes" if kind == "target" else "categories"] = list(dict.fromkeys(words.values()))
            spellings = {spelled: word for spelled, word in words.items() if spelled != word}
            column |= {"spellings": spellings} if spellings else {}
            kept = {"categories", "constraints.enum", "trueValues", "falseValues"}
            kept |= {"categoriesOrdered"} if kind == "ordered" or not self.categories_ordered else set()
        elif kind in ("number", "target", "date"):
            limits_found = self._limits(kind)
            column |= {"range": limits_found} if limits_found else {}
            kept |= _LIMITS if limits_found else set()
        absent = [word for word in missing if word not in ABSENT]
        if kind == "number":
            column |= {"absent": [_number(word) for word in absent]} if absent else {}
            column |= {"thousands": self.group_char} if self.group_char in _MARKS else {}
            kept |= {"groupChar"} if self.group_char in _MARKS else set()
        elif kind == "date":
            kept |= {"format"}
            column |= {"format": self._pattern()} if self._pattern() != _DATES["date"] else {}
        kept |= {"missingValues"} if kind == "number" or not absent else set()
        kept |= {"bareNumber"} if self.moretta.get("unit") else set()
        if kind == "drop" and not self.moretta:
            return column, [f'all of it, as type "{self.type}" without categories is no input (kind = "drop")']
        unkept = self.stated("name", "type", "constraints", "moretta")
        unkept += [f"constraints.{name}" for name in limits.stated("required")]
        unkept += (
            ["labels"]
            if any(isinstance(category, _Value) and category.model_extra for category in self.categories)
            else []
        )
        unkept += ["the time of day"] if (kind, self.type) == ("date", "datetime") else []
        return column, [name for name in unkept if name not in kept]

    def _kind(self, words: Mapping[str, str]) -> str:
        if words:
            return "ordered" if self.categories_ordered and len(words) > 1 else "category"
        if self.type in ("number", "integer", "year"):
            return "number"
        return "date" if self.type in _DATES and self._pattern() != "any" else "drop"

    def _words(self) -> dict[str, str]:
        """Return the allowed words of a cell, each with its category."""
        if self.type == "boolean":
            return {word: words[0] for words in (self.false_values, self.true_values) for word in words}
        if self.type not in ("string", "integer", "any"):
            return {}
        return {word: word for word in _words(self.categories) or map(str, self.constraints.enum)}

    def _pattern(self) -> str:
        pattern = self.format.removeprefix("fmt:")
        return _DATES.get(self.type, "") if pattern == "default" else pattern

    def _limits(self, kind: str) -> list[Any]:
        """Return the range, if both ends are set."""
        ends = [end for end in (self.constraints.minimum, self.constraints.maximum) if end is not None]
        with suppress(ValueError):
            if len(ends) == 2 and kind == "date":
                return [datetime.strptime(str(end), self._pattern()).date().isoformat() for end in ends]
            if len(ends) == 2:
                return [float(end) for end in ends]
        return []


class _Table(_Descriptor):
    fields: Annotated[tuple[_Field, ...], Field(min_length=1)]
    missing_values: Values = ("",)
    primary_key: str | tuple[str, ...] = ()
    fields_match: str = "exact"


def read(text: str, where: str, target: str | None = None) -> tuple[Columns, list[str]]:
    """Return a Table Schema's columns as in schema.toml, and in words the properties that it cannot keep.

    Args:
        where: The file, which begins each error's sentence.
        target: The column to predict, which a field may also declare by ``"moretta": {"kind": "target"}``.

    Raises:
        ParameterError: The text is not a Table Schema, or a name is missing or repeated.
    """
    try:
        table = _Table.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "its text"
        raise ParameterError(f"{where}: expected a Table Schema; {place} is wrong: {first['msg'][:120]}") from None
    names = [field.name for field in table.fields]
    if len(set(names)) < len(names) or (target is not None and target not in names):
        raise ParameterError(f"{where}: expected the name of each field once, and the target's among them")
    key = (table.primary_key,) if isinstance(table.primary_key, str) else table.primary_key
    everywhere, columns, unkept = _words(table.missing_values), Columns(), list[str]()
    for field in table.fields:
        kind = "target" if field.name == target else "id" if (field.name,) == key else None
        missing = everywhere if field.missing_values is None else _words(field.missing_values)
        column, lost = field.column(field.moretta.get("kind", kind), missing)
        if field.missing_values is None and column["kind"] in ("category", "ordered", "date", "target"):
            lost += [f'missingValues ([data] absent = ["{word}"] says so)' for word in missing if word not in ABSENT]
        columns[field.name] = column | field.moretta
        unkept += [f"{field.name}: {', '.join(lost)}"] if lost else []
    silent = ("$schema", "fields", "missingValues", *(["primaryKey"] if len(key) == 1 and key[0] in names else []))
    return columns, unkept + table.stated(*silent, *(["fieldsMatch"] if table.fields_match == "equal" else []))


def written(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return columns of schema.toml as a Table Schema that `read` reads back."""
    fields, key = list[dict[str, Any]](), list[str]()
    for name, column in columns.items():
        field, kind = {"name": name, **_native(column)}, None
        if column["kind"] == "id":
            key, kind = [name], "id"
        known = _Field.model_validate_json(json.dumps(field))
        missing = _words(known.missing_values or ())
        own, more = known.column(kind, missing)[0], dict[str, Any]()
        if column["kind"] == "drop" or own["kind"] != column["kind"]:  # a kind that a reader would not infer
            own, more = known.column(column["kind"], missing)[0], {"kind": column["kind"]}
        more |= {what: value for what, value in column.items() if own.get(what) != value}
        fields.append(field | ({"moretta": more} if more else {}))
    table: dict[str, Any] = {"$schema": PROFILE, "fieldsMatch": "equal", "missingValues": ABSENT, "fields": fields}
    return json.dumps(table | ({"primaryKey": key} if key else {}), indent=2, ensure_ascii=False) + "\n"


def _native(column: Mapping[str, Any]) -> dict[str, Any]:
    """Return a column's properties in a Table Schema."""
    kind, limits = column["kind"], column.get("range")
    words = column.get("categories") or column.get("classes")
    constraints: dict[str, Any] = (
        {"required": True} if kind != "drop" and column.get("blanks", "refuse") == "refuse" else {}
    )
    if words:
        ordered = {"categoriesOrdered": True} if kind == "ordered" else {}
        return {
            "type": "string",
            "categories": [*words, *column.get("spellings", ())],
            **ordered,
            "constraints": constraints,
        }
    if kind == "date":
        pattern = column.get("format", _DATES["date"])
        days = map(date.fromisoformat, limits or ())  # a year is written in four digits, which not every %Y does
        ends = [day.strftime(pattern.replace("%Y", f"{day.year:04}")) for day in days]
        constraints |= dict(zip(("minimum", "maximum"), ends, strict=False))
        return {
            "type": "date",
            "format": "default" if pattern == _DATES["date"] else pattern,
            "constraints": constraints,
        }
    if kind not in ("number", "target"):
        return {"type": "any" if kind == "drop" else "string", "constraints": constraints}
    constraints |= dict(zip(("minimum", "maximum"), limits or (), strict=False))
    field: dict[str, Any] = {"type": "number", "constraints": constraints}
    field |= {"groupChar": column["thousands"]} if "thousands" in column else {}
    field |= {"bareNumber": False} if column.get("unit") else {}
    absent = [
        word if isinstance(word, str) else json.dumps(word).removesuffix(".0") for word in column.get("absent", ())
    ]
    return field | ({"missingValues": list(dict.fromkeys((*ABSENT, *absent)))} if absent else {})


def _words(values: Values) -> list[str]:
    return [str(value.value if isinstance(value, _Value) else value) for value in values]


def _number(word: str) -> float | str:
    """Return a word as a number if it is one."""
    with suppress(ValueError):
        if math.isfinite(number := float(word)) and "_" not in word:
            return number
    return word
