"""CSV that a person may open in a spreadsheet, which computes a cell that begins as a formula does.

A class or an id may be called ``=HYPERLINK(...)``. Such a cell gets a single quote before it and stands in double
quotes, as OWASP's page "CSV Injection" advises, so a spreadsheet shows it as text. Where a decimal comma is usual it
takes semicolons for separators, and heeds no quotes then but those behind one. So what begins as a formula behind a
separator, a quote or a line end within a cell gets a single quote too. Numbers stay as they are.

    >>> escaped("=1+1"), escaped("-0.5"), escaped("'=1+1"), unescaped(escaped("=1+1"))
    ("'=1+1", '-0.5', "''=1+1", '=1+1')
    >>> escaped("a;=1+1"), unescaped(escaped("a;=1+1"))
    ("a;'=1+1", 'a;=1+1')
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
# Where a cell may begin, our quotes, and behind them what begins a formula, of East Asian width too.
_FORMULA = re.compile(r"((?:^|[;\t|\"\r\n])[ \ufeff]*)('*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")


def written(header: Sequence[str], columns: Sequence[Sequence[str] | Sequence[float]]) -> bytes:
    """Return a CSV file of columns of equal length, with a header."""
    rows = [header, *zip(*columns, strict=True)]
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows).encode()


def escaped(cell: str) -> str:
    """Return a cell that no spreadsheet computes; further quotes before a formula are kept apart from ours."""
    return cell if re.fullmatch(NUMBER, cell) else _FORMULA.sub(r"\1'\2", cell)


def unescaped(cell: str) -> str:
    """Return what `escaped` was given."""
    found = _FORMULA.sub(lambda match: match[1] + match[2][1:], cell)
    return found if escaped(found) == cell else cell


def is_predicted(names: Sequence[str]) -> bool:
    """Return whether columns are named as those of `moretta.run.prediction` are, perhaps behind an id."""
    return _is_predicted(names) or _is_predicted(names[1:])


def _is_predicted(names: Sequence[str]) -> bool:
    if names[:1] == ["prediction"]:
        return all(name.startswith("probability_") for name in names[1:])
    return bool(names) and list(names) == [f"prediction_{k}" for k in range(len(names))]


def _cell(value: str | float) -> str:
    if not isinstance(value, str):
        return repr(float(value))
    text = escaped(value)
    quoted = text != value or not text or re.search(r'[",\r\n]', text)
    return '"' + text.replace('"', '""') + '"' if quoted else text
