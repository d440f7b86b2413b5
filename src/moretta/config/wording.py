"""The sentences for mistakes in a run file.

Everything here is plain data in, one sentence out; `moretta.config.run_files` adds the file's name and raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moretta.contract.wording import _quoted, either, nearest, shown

if TYPE_CHECKING:
    from pydantic import ValidationError  # at run time it would cost an edge client 12 MiB

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "string_too_short": "a string that is not empty",
    "path_type": "a path in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}


def unknown_section(name: str, value: object, sections: Mapping[str, Iterable[str]]) -> str:
    """Say that the top of the file has a section or a bare key that is not known."""
    if not isinstance(value, dict):
        home = next((section for section, keys in sections.items() if name in keys), None)
        hint = f"put it under [{home}]" if home else f"put it under one of {_headers(sections)}"
        return f"the key {name} stands before any section; {hint}"
    close = nearest(name, sections)
    return f"the section [{name}] is not known; " + (
        f"did you mean [{close}]?" if close else f"the sections are {_headers(sections)}"
    )


def unknown_key(section: str, key: str, sections: Mapping[str, Iterable[str]], protocol: str = "") -> str:
    """Say that a section has no such key, and what was probably meant.

    sections: the known keys of each section and, beside them, of each protocol by its name.
    protocol: the name of the run's protocol if the section is [protocol].
    """
    mine = list(sections[protocol or section])
    if protocol:
        homes = [name for name in sections if name not in _SECTIONS and key.replace("_", "-") in sections[name]]
        if homes and protocol not in homes:
            return (
                f"[{section}] {key} is a key of {either(homes).replace(' or ', ' and ')}, not of {protocol}; remove it"
            )
    close = nearest(key, mine)
    home = next((name for name in sections if name != section and key in sections[name]), None)
    if home and close != key.replace("_", "-"):
        return f"[{section}] {key} is not known; it is a key of [{home if home in _SECTIONS else 'protocol'}]"
    hint = f"did you mean {close}?" if close else f"the keys here are {', '.join(mine)}"
    return f"[{section}] {key} is not known; {hint}"


def wrong_choice(section: str, key: str, value: object, choices: Iterable[str]) -> str:
    """Say that a key takes one of a few values and got another one."""
    choices = list(choices)
    close = nearest(value, choices) if isinstance(value, str) else None
    hint = f'; did you mean "{close}"?' if close else ""
    return f"[{section}] {key}: expected {either(map(_quoted, choices))}, got {shown(value)}{hint}"


def first_error(section: str, error: ValidationError) -> str:
    """Return the sentence for the first thing that pydantic found wrong in a section."""
    found: Any = error.errors(include_url=False)[0]
    kind, ctx, place = found["type"], found.get("ctx", {}), found["loc"]
    key = str(place[0]) if place else ""
    where = f"[{section}] {key}" + "".join(f"[{part}]" for part in place[1:] if isinstance(part, int))
    if kind == "missing":
        return f"{where} is missing; add it"
    if kind == "literal_error":
        choices = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", ctx["expected"])]
        return wrong_choice(section, key, found["input"], choices)
    if kind == "value_error":
        expected = str(ctx["error"])
    elif kind == "greater_than" and type(ctx["gt"]) is int:
        expected = f"{ctx['gt'] + 1} or more"
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**ctx)
    else:
        return f"{where}: {found['msg'][:1].lower()}{found['msg'][1:]}, got {shown(found['input'])}"
    return f"{where}: expected {expected}, got {shown(found['input'])}"


_SECTIONS = ("run", "data", "model", "protocol", "secure-aggregation", "engine", "engine.faults")


def _headers(sections: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in sections)
