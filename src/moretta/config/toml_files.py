"""TOML as it lies in files and in `--set`, read into tables."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from moretta.contract.wording import shown
from moretta.errors import ParameterError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file. what: its name in errors. Raises ParameterError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ParameterError(f"{what} {path} does not exist; give the path of a TOML file") from None
    except OSError as error:
        raise ParameterError(f"{what} {path} cannot be read ({error.strerror}); give a TOML file") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path} is not text in UTF-8; save {what} as UTF-8") from None
    return parse_toml(text, path)


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Return the tables of TOML text. path: where it is from."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ParameterError(f"{path} is nested too deeply for a run file; write flat lists") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python reads
        said = re.sub(r" \(at .*\)$", "", str(error))
        line = re.search(r"\(at (line \d+|end of document)", str(error))
        where = f", {line[1].replace('end of document', 'at its end')}" if line else ""
        raise ParameterError(f"{path}{where}: this is not TOML: {said[:1].lower()}{said[1:]}") from None


def override(tables: dict[str, Any], text: str) -> None:
    """Put a value into tables. text: "section.key=value"; the value is TOML, else a string.

    Raises ParameterError for another text.
    """
    place, equals, value = text.partition("=")
    parts = [part.strip() for part in place.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ParameterError(f"--set: expected section.key=value, got {shown(text)}")
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ParameterError(f"--set {place}: {part} is a value and not a section; give section.key=value")
    table[parts[-1]] = _value(value.strip())


def _value(text: str) -> object:
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = tables["value"]
    # A date is taken as text, since no key takes a date; so is text that only looks like more TOML.
    return value if len(tables) == 1 and isinstance(value, bool | int | float | str | list | dict) else text
