"""The base of a settings section: frozen, validated once, its keys with dashes in a file and underscores in Python.

A rule is a condition and a sentence. The sentence's keys are data, because a file and Python spell them differently. A
field of a sentence names a key, and its format selects what is shown:

    {engine.edge}             the key: `[engine] edge` in a file, `Engine(edge=..)` in Python
    {engine.edge:=}           with its value: `[engine] edge = ["north"]`
    {engine.name:="flare"}    with another value
    {engine.edge:v}           the value alone

In a rule of one section the key stands without the section: `{edge}`. A sentence names a section once, at its first
key. The module needs pydantic, so no role of an inference-only process imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from string import Formatter
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from moretta.contract.wording import enumerated, first_error_in_python, shown, words_of
from moretta.errors import ParameterError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Words = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise ValueError('"cpu", "cuda" or "cuda:" and a number')
    return name


Momentum = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Spelled:
    """The values that a key accepts, in words for the reference of keys, if its type is not enough."""

    values: str


@dataclass(frozen=True)
class Unit:
    """The unit of a key's number, for the reference of keys."""

    name: str


Device = Annotated[str, AfterValidator(_device), Spelled('`"cpu"`, `"cuda"` or `"cuda:1"`')]


def kebab(name: str) -> str:
    """Return a field's name in a run file."""
    return name.replace("_", "-")


@dataclass(frozen=True)
class Mark:
    """Who sets a key if silos are on machines of their own; a key without a mark is a shared setting."""

    owner: str


SERVER = Mark("server")
SITE = Mark("site")


def mark_of(known: FieldInfo) -> Mark | None:
    """Return the mark of a field, or None for a shared one."""
    return next((mark for mark in known.metadata if isinstance(mark, Mark)), None)


def _owners(kind: type[BaseModel], key: str) -> list[str]:
    """Return the classes that have a key which this section lacks, among loaded classes with the same base.

    Protocols are loaded together; the sections of a run file share no base.
    """
    owners, waiting = list[str](), list[type[BaseModel]]([kind.__mro__[kind.__mro__.index(Section) - 1]])
    while waiting:
        candidate = waiting.pop()
        waiting += candidate.__subclasses__()
        if key in candidate.model_fields and not candidate.__subclasses__():
            owners.append(candidate.__name__)
    return sorted(owners)


def _kinds(annotation: object) -> list[object]:
    """Return the types in a key's annotation: one, or the alternatives of a union."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(parts[0])
    return [kind for part in parts for kind in _kinds(part)] if origin in (Union, UnionType) else [annotation]


def section_within(kind: type[BaseModel], key: object) -> type[BaseModel] | None:
    """Return the class of a section, or of a list of sections, that a key of another holds; None for any other key."""
    known = kind.model_fields.get(str(key).replace("-", "_"))
    kinds = [] if known is None else _kinds(known.annotation)
    inner = [part for member in kinds for part in (get_args(member) if get_origin(member) is tuple else (member,))]
    return next((member for member in inner if isinstance(member, type) and issubclass(member, BaseModel)), None)


def _refuse_python_alone(kind: type[BaseModel], settings: Mapping[str, object]) -> None:
    """Refuse values that pydantic accepts from Python alone: booleans for 1 and 0, and a set for a list."""
    if unordered := next((name for name, value in settings.items() if isinstance(value, set | frozenset)), ""):
        raise ParameterError(f"{kind.__name__}: {unordered}: expected a list, because its order counts; got a set")
    for name in (name for name, value in settings.items() if isinstance(value, bool) and name in kind.model_fields):
        kinds = _kinds(kind.model_fields[name].annotation)
        if bool not in kinds and (float in kinds or int in kinds):
            number = "number" if float in kinds else "whole number"
            raise ParameterError(f"{kind.__name__}: {name}: expected a {number}, got {shown(settings[name])}")


def _asks_for_keywords(kind: type[BaseModel], value: object) -> str:
    """Return the sentence that settings are keywords; its example is the first key that accepts the value."""
    known, own = kind.model_fields, kind.__name__

    def may_be(info: FieldInfo) -> bool:
        number = type(value) in (int, float) and type(value) in _kinds(info.annotation) and info.default != 0
        return number or (isinstance(value, str) and value in words_of(info.annotation))

    key = next((name for name, info in known.items() if may_be(info)), "")
    example = f"{own}({key}={shown(value)})" if key else f"{own}({next(iter(known))}=..)"
    return f"{own} takes its settings by keyword, for example {example}"


ARGUMENTS = ("Run", "Data")  # sections whose keys are keywords of `Federation`


@dataclass(frozen=True)
class SettingRule:
    """A rule on one section or between sections.

    Attributes:
        broken: Returns true if the rule is broken, or further values for the sentence's fields.
        sentence: States what is wrong, what was expected, and what to do; its fields are the keys of the rule.
    """

    broken: Callable[[Any], object]
    sentence: str


@dataclass(frozen=True)
class SettingKey:
    """A key to show. home: its section in a file. owner: its class. repeated: whether its section was named before."""

    home: str
    owner: str
    name: str
    repeated: bool


Reader = Callable[[SettingKey, str], str]
"""Writes a key, and its value unless that is empty."""


def in_file(key: SettingKey, value: str) -> str:
    """Write a key in a file's form: `[engine] edge = ["north"]`."""
    where = "" if key.repeated else f"[{key.home}] "
    return f"{where}{key.name.replace('_', '-')}{f' = {value}' if value else ''}"


def in_python(key: SettingKey, value: str) -> str:
    """Write a key in Python's form: a keyword of `Federation`, or `Engine(edge=["north"])`."""
    if (key.home, key.name) == ("protocol", "name"):  # the class replaces this key
        return f"protocol={key.owner}(..)"
    if key.owner in ARGUMENTS:
        return f"{key.name} = {value}" if value else key.name
    if key.repeated:
        return f"{key.name}={value}" if value else key.name
    return f"{key.owner}({key.name}={value or '..'})"


def check_rules(rules: Iterable[SettingRule], of: Any, reader: Reader, home: str = "") -> None:
    """Raise ParameterError for the first broken rule. of: a section, or all. home: the section's name in a file."""
    for rule in rules:
        if breach := rule.broken(of):
            values = breach if isinstance(breach, Mapping) else {}
            raise ParameterError(_Written(of, reader, home).vformat(rule.sentence, (), values))


class _Written(Formatter):
    """Writes a sentence. of, reader, home: as of `check_rules`."""

    def __init__(self, of: Any, reader: Reader, home: str) -> None:
        self._of, self._reader, self._home, self._named = of, reader, home, set[str]()

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Return a value that the rule returned, or a section and its key."""
        home, _, name = field_name.rpartition(".")
        if field_name in kwargs:
            return kwargs[field_name], field_name
        return _Key(home.replace("_", "-") or self._home, getattr(self._of, home) if home else self._of, name), name

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a key in the reader's form."""
        if not isinstance(value, _Key):
            return str(value)
        now = getattr(value.section, value.name)
        own = f"{now:g}" if isinstance(now, float) else shown(now)
        if isinstance(now, bool) and self._reader is in_python:
            own = repr(now)
        if format_spec == "v":
            return now if isinstance(now, str) else own
        key = SettingKey(value.home, type(value.section).__name__, value.name, value.home in self._named)
        self._named.add(value.home)
        return self._reader(key, own if format_spec == "=" else format_spec.removeprefix("="))


class _Key(NamedTuple):
    home: str
    section: object
    name: str


class Section(BaseModel):
    """A section of a run file, or the same settings from Python.

    Attributes:
        RULES: The rules between its keys.

    Raises:
        ParameterError: Settings from Python are impossible; the sentence names the key.
    """

    RULES: ClassVar[tuple[SettingRule, ...]] = ()
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=kebab, populate_by_name=True)

    if not TYPE_CHECKING:  # where pydantic's plugin knows each section's own keys

        def __init__(self, *unkeyed: Any, **settings: Any) -> None:
            if unkeyed:
                raise ParameterError(_asks_for_keywords(type(self), unkeyed[0]))
            _refuse_python_alone(type(self), settings)
            try:
                super().__init__(**settings)
            except ValidationError as error:
                kind = type(self)
                first = error.errors(include_url=False)[0]
                key = str(first["loc"][0]) if first["type"] == "extra_forbidden" else ""
                if owners := _owners(kind, key):
                    others, own = enumerated(owners), kind.__name__
                    raise ParameterError(f"{own}: {key} is a keyword of {others}, not of {own}; remove it") from None
                raise ParameterError(first_error_in_python(kind, error)) from None

        # This constructor is not for run files: `model_validate_json` reads those, and its caller writes their errors.
        __init__.__pydantic_base_init__ = True
        __init__.__signature__ = signature(lambda self, **settings: None)  # help() and the site show keywords alone

    def changed(self, *names: str) -> list[str]:
        """Return the settings among these whose value differs from their default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _obeys(self, info: ValidationInfo) -> Self:
        home = (info.context or {}).get(HOME, "")
        check_rules(self.RULES, self, in_file if home else in_python, home)
        return self


HOME = "home"  # in the context of a validation: the section's name in a file
