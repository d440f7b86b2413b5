"""How error sentences show wrong words, values and arguments; and the number below which counts are withheld."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from moretta.errors import MorettaError, ParameterError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError  # at run time it would cost an edge client 12 MiB

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string in quotes",
    "string_too_short": "a string that is not empty",
    "path_type": "a path in quotes",
    "list_type": "a list",
    "dict_type": "a table, such as {{ key = value }}",
    "tuple_type": "a list",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}


LARGE_TARGETS = "a new run with standardise-targets, where targets are large numbers"  # advice if a run diverged
LEAST_SHOWN = 5  # the default (`moretta.data.look`)


def shown(value: object) -> str:
    """Return a value in a run file's form, cut to a readable length."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            text = '"' + value + '"'
        case dict():
            return "a table"
        case list() | tuple():
            text = "[" + ", ".join(map(shown, value[:9])) + (", ...]" if len(value) > 9 else "]")
        case int() if not -(2**63) <= value < 2**63:
            return "a number of more than 64 bits"  # Python refuses to print the longest ones
        case _:
            text = str(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def kind_of(value: object) -> str:
    """Return an object's type with its article, as "a list" or "an int"."""
    name = type(value).__name__
    return f"{'an' if name.lower().startswith(tuple('aeiou')) or name == 'ndarray' else 'a'} {name}"


def either(choices: Iterable[str]) -> str:
    """Return choices as a list in a sentence: a, b or c."""
    return _listed(choices, "or")


def enumerated(names: Iterable[str]) -> str:
    """Return names as a list in a sentence: a, b and c."""
    return _listed(names, "and")


def _listed(words: Iterable[str], joint: str) -> str:
    *most, last = words
    return f"{', '.join(most)} {joint} {last}" if most else last


def first_of(words: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first words, and the number of the others."""
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def unfit(value: object) -> str | None:
    """Return what a run file expects instead of a value that TOML can write and no key accepts, or None."""
    match value:
        case list() | tuple():
            return next((reason for reason in map(unfit, value) if reason), None)
        case dict():
            return next((reason for reason in map(unfit, value.values()) if reason), None)
        case float() if not math.isfinite(value):
            return "a finite number"
        case int() if not -(2**63) <= value < 2**63:
            return "a whole number of at most 64 bits"
        case bool() | int() | float() | str():
            return None
    return "a number, a string in quotes, true, false or a list (put a date in quotes)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` most resembles, or whose initials it is; None without a single such word.

    >>> nearest("lr", ["momentum", "learning-rate"])
    'learning-rate'
    """
    written, words = word.replace("_", "-").lower(), list(known)
    close = [
        candidate
        for candidate in words
        if "-" in candidate and written == "".join(part[:1] for part in candidate.split("-"))
    ]
    close = close or difflib.get_close_matches(written, words, n=1)
    return close[0] if len(close) == 1 else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known word, if one is near, and all known ones.

    >>> did_you_mean("dirichet", ["iid", "dirichlet"])
    'did you mean "dirichlet"? Known: dirichlet, iid'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (f'did you mean "{close[0]}"? ' if close else "") + f"Known: {', '.join(names) or 'none'}"


def check_choice(key: str, value: str, known: Sequence[str]) -> None:
    """Raise ParameterError, naming the key and the nearest choice, unless the value is a known one."""
    if value not in known:
        raise ParameterError(f'{key} = "{value}" is unknown; {did_you_mean(value, known)}')


def wrong_choice(section: str, key: str, value: object, choices: Iterable[str]) -> str:
    """Return the sentence for a key with a value outside its choices."""
    return f"[{section}] {key}: {_not_among(value, list(choices))}"


def _not_among(value: object, choices: Sequence[str]) -> str:
    close = nearest(value, choices) if isinstance(value, str) else None
    hint = f'; did you mean "{close}"?' if close else ""
    quoted = (choice if choice.isdigit() else f'"{choice}"' for choice in choices)
    return f"expected {either(quoted)}, got {shown(value)}{hint}"


def first_error(section: str, error: ValidationError, kind: type[BaseModel], skip: int = 0) -> str:
    """Return the sentence for pydantic's first error in a section. skip: parts of its place before the key."""
    return _sentence(f"[{section}] ", error, kind, lambda key: key, skip)


def first_error_in_python(kind: type[BaseModel], error: ValidationError) -> str:
    """Return the same for settings from Python, whose keys have underscores."""
    fault = error.errors(include_url=False)[0]
    if fault["type"] == "extra_forbidden":
        return f"{kind.__name__}: {unknown_word(str(fault['loc'][0]), list(kind.model_fields))}"
    return _sentence(f"{kind.__name__}: ", error, kind, lambda key: key.replace("-", "_"))


def words_of(annotation: object) -> list[object]:
    """Return the words and numbers that a key accepts, by a literal anywhere in its type."""
    parts = get_args(annotation)
    return list(parts) if get_origin(annotation) is Literal else [word for part in parts for word in words_of(part)]


def unknown_word(word: str, known: Sequence[str]) -> str:
    """Return the sentence for an unknown keyword, with the probable one."""
    close = nearest(word, [name.replace("_", "-") for name in known])
    hint = f"did you mean {close.replace('-', '_')}?" if close else f"known are {', '.join(known)}"
    return f"{word} is not known; {hint}"


def _sentence(
    opening: str, error: ValidationError, model: type[BaseModel], written: Callable[[str], str], skip: int = 0
) -> str:
    fault: Any = error.errors(include_url=False)[0]
    kind, ctx, place = fault["type"], fault.get("ctx", {}), fault["loc"][skip:]
    key = written(str(place[0])) if place else ""
    where = f"{opening}{key}" + "".join(f"[{part}]" for part in place[1:] if isinstance(part, int))
    if kind == "missing":
        return f"{where} is missing; add it"
    if kind == "literal_error":
        choices = words_of(model.model_fields[str(place[0]).replace("-", "_")].annotation)
        return f"{where}: {_not_among(fault['input'], list(map(str, choices)))}"
    if kind == "value_error":
        expected = str(ctx["error"])
    elif kind == "greater_than" and type(ctx["gt"]) is int:
        expected = f"{ctx['gt'] + 1} or more"
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**ctx)
    else:
        return f"{where}: {fault['msg'][:1].lower()}{fault['msg'][1:]}, got {shown(fault['input'])}"
    return f"{where}: expected {expected}, got {shown(fault['input'])}"


def unknown_section(name: str, value: object, sections: Mapping[str, Iterable[str]]) -> str:
    """Return the sentence for an unknown section, or for a key before any section."""
    if not isinstance(value, dict):
        home = next((section for section, keys in sections.items() if name in keys), None)
        hint = f"put it under [{home}]" if home else f"put it under one of {_headers(sections)}"
        return f"the key {name} comes before any section; {hint}"
    close = nearest(name, sections)
    return f"the section [{name}] is not known; " + (
        f"did you mean [{close}]?" if close else f"the sections are {_headers(sections)}"
    )


def unknown_key(
    section: str, key: str, sections: Mapping[str, Iterable[str]], protocols: Container[str], protocol: str = ""
) -> str:
    """Return the sentence for an unknown key of a section, with the probable one.

    Args:
        sections: The known keys by section, and by each protocol's name.
        protocols: Their names.
        protocol: The run's if the section is [protocol], else empty.
    """
    keys = list(sections[protocol or section])
    if protocol:
        homes = [name for name in sections if name in protocols and key.replace("_", "-") in sections[name]]
        if homes and protocol not in homes:
            return f"[{section}] {key} is a key of {enumerated(homes)}, not of {protocol}; remove it"
    close = nearest(key, keys)
    home = next((name for name in sections if name != section and key in sections[name]), None)
    if home and close != key.replace("_", "-"):
        return f"[{section}] {key} is not known; it is a key of [{'protocol' if home in protocols else home}]"
    hint = f"did you mean {close}?" if close else f"the keys here are {', '.join(keys)}"
    return f"[{section}] {key} is not known; {hint}"


def _headers(sections: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in sections)


Called = TypeVar("Called", bound=Callable[..., Any])


def names_keywords(elsewhere: Mapping[str, str] | None = None) -> Callable[[Called], Called]:
    """Return a decorator by which a function or class refuses an unknown keyword and names the nearest known one.

    Args:
        elsewhere: Keywords of another place, with that place.
    """

    def decorate(called: Called) -> Called:
        function: Callable[..., Any] = vars(called)["__init__"] if isinstance(called, type) else called
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        owner = called.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def refusing(*args: Any, **arguments: Any) -> Any:
            for name in arguments:
                if name not in known:
                    others = elsewhere or {}
                    words = (word for word in others if name in (word, "".join(part[0] for part in word.split("_"))))
                    meant = next(words, None)
                    meaning = unknown_word(name, known) if meant is None else f"{meant} is {others[meant]}"
                    raise ParameterError(f"{owner}: {meaning}")
            return function(*args, **arguments)

        if not isinstance(called, type):
            return refusing  # type: ignore[return-value]
        setattr(called, "__init__", refusing)  # noqa: B010  # mypy rejects an assignment
        return called

    return decorate


_OF_OPTIONS = {
    "--resume": "resume=True",
    "--out": "out=..",
    "--silo": "silo=..",
    "--model module:function": 'model="module:function"',
    "--model": "model=..",
    "--background FILE": "background=(x, y)",
}


@contextmanager
def says_keywords() -> Iterator[None]:
    """Replace the shell's options by Python's keywords in an error's sentence: both interfaces share the checks."""
    try:
        yield
    except MorettaError as error:
        options = "|".join(sorted(_OF_OPTIONS, reverse=True))  # the longest first
        sentence = re.sub(rf"(?<!\S)({options})(?![\w-])", lambda option: _OF_OPTIONS[option[0]], str(error))
        error.args = (sentence,)
        raise


def path_of(value: object, expected: str) -> Path:
    """Return a path. expected: the beginning of the `moretta.errors.ParameterError` for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise ParameterError(f"{expected}; got {kind_of(value)}")
    return Path(value)
