"""Rules of settings: a condition, and a sentence whose keys are data, written as its reader knows them.

A field of a sentence names a key, and its format says what is shown of it:

    {engine.edge}             the key: `[engine] edge` in a file, `Engine(edge=..)` in Python
    {engine.edge:=}           with its value: `[engine] edge = ["north"]`
    {engine.name:="flare"}    with another value
    {engine.edge:v}           the value alone

In a rule of one section a key has no section before it: `{edge}`. A sentence names a section once, at its first key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from moretta.contract.wording import shown
from moretta.errors import ParameterError

ARGUMENTS = ("Run", "Data")  # sections whose keys are keywords of `Federation`


@dataclass(frozen=True)
class SettingRule:
    """What must hold, of one section or between sections.

    broken: true where it does not hold, or further values that the sentence has fields for. sentence: what is wrong,
    what was expected, and what to do; its fields are the keys that the rule is about.
    """

    broken: Callable[[Any], object]
    sentence: str


@dataclass(frozen=True)
class SettingKey:
    """A key as a reader is to be shown it. home: its section in a file. owner: its class. repeated: in one sentence."""

    home: str
    owner: str
    name: str
    repeated: bool


Reader = Callable[[SettingKey, str], str]
"""Writes a key, with a value unless that is empty."""


def in_file(key: SettingKey, value: str) -> str:
    """Write a key as a file has it: `[engine] edge = ["north"]`."""
    where = "" if key.repeated else f"[{key.home}] "
    return f"{where}{key.name.replace('_', '-')}{f' = {value}' if value else ''}"


def in_python(key: SettingKey, value: str) -> str:
    """Write a key as Python has it: a keyword of `Federation`, or `Engine(edge=["north"])`."""
    if (key.home, key.name) == ("protocol", "name"):  # which its class stands for
        return f"protocol={key.owner}(..)"
    if key.owner in ARGUMENTS:
        return f"{key.name} = {value}" if value else key.name
    if key.repeated:
        return f"{key.name}={value}" if value else key.name
    return f"{key.owner}({key.name}={value or '..'})"


def check(rules: Iterable[SettingRule], of: Any, reader: Reader, home: str = "") -> None:
    """Raise `moretta.errors.ParameterError` for the first rule that does not hold.

    of: a section, or what has sections as attributes. home: the section's name in a file.
    """
    for rule in rules:
        if breach := rule.broken(of):
            values = breach if isinstance(breach, Mapping) else {}
            raise ParameterError(_Written(of, reader, home).vformat(rule.sentence, (), values))


class _Written(Formatter):
    """Writes a sentence. of, reader, home: as of `check`."""

    def __init__(self, of: Any, reader: Reader, home: str) -> None:
        self._of, self._reader, self._home, self._named = of, reader, home, set[str]()

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Return a value that the rule has found, or a section and its key."""
        home, _, name = field_name.rpartition(".")
        if field_name in kwargs:
            return kwargs[field_name], field_name
        return _Key(home.replace("_", "-") or self._home, getattr(self._of, home) if home else self._of, name), name

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a key as the reader knows it."""
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
