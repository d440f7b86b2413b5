"""How error sentences show wrong words and values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from moretta.errors import ParameterError


def shown(value: object) -> str:
    """Return a value as it stands in a run file, cut to a readable length."""
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
            return "a number of more than 64 bits"  # Python refuses to print the very longest ones
        case _:
            text = str(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def either(choices: Iterable[str]) -> str:
    """Return choices as a sentence lists them."""
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


def unfit(value: object) -> str | None:
    """Say what a run file expects in the place of a value that TOML can write and no key can take, or None."""
    match value:
        case list() | tuple():
            return next((said for said in map(unfit, value) if said), None)
        case dict():
            return next((said for said in map(unfit, value.values()) if said), None)
        case float() if not math.isfinite(value):
            return "a finite number"
        case int() if not -(2**63) <= value < 2**63:
            return "a whole number of at most 64 bits"
        case bool() | int() | float() | str():
            return None
    return "a number, a string in quotes, true, false or a list (put a date in quotes)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` most resembles, if any does."""
    close = difflib.get_close_matches(word.replace("_", "-").lower(), list(known), n=1)
    return close[0] if close else None


def _quoted(choice: str) -> str:
    return choice if choice.isdigit() else f'"{choice}"'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known one, if any is near, and all of them.

    >>> did_you_mean("dirichet", ["iid", "dirichlet"])
    'did you mean "dirichlet"? Known: dirichlet, iid'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (f'did you mean "{close[0]}"? ' if close else "") + f"Known: {', '.join(names) or 'none'}"


def check_choice(key: str, value: str, known: Sequence[str]) -> None:
    """Raise ParameterError, naming the key and the nearest choice, unless the value is among the known ones."""
    if value not in known:
        raise ParameterError(f'{key} = "{value}" is unknown; {did_you_mean(value, known)}')
