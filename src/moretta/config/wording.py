"""The sentences for mistakes in a run file.

Everything here is plain data in, one sentence out; `moretta.config.run_files` adds the file's name and raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moretta.contract.wording import enumerated, first_error, nearest, wrong_choice

__all__ = ["first_error", "unknown_key", "unknown_section", "wrong_choice"]


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
            return f"[{section}] {key} is a key of {enumerated(homes)}, not of {protocol}; remove it"
    close = nearest(key, mine)
    home = next((name for name in sections if name != section and key in sections[name]), None)
    if home and close != key.replace("_", "-"):
        return f"[{section}] {key} is not known; it is a key of [{home if home in _SECTIONS else 'protocol'}]"
    hint = f"did you mean {close}?" if close else f"the keys here are {', '.join(mine)}"
    return f"[{section}] {key} is not known; {hint}"


_SECTIONS = ("run", "data", "model", "protocol", "secure-aggregation", "engine", "engine.faults")


def _headers(sections: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in sections)
