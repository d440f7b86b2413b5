"""Tables of what is refused: a file each in refusals/, a row each of a call, its error and what the error says.

``call => Error: sentence`` is a row. The sentence may be a part, three dots in it stand for anything, and one that
begins with ~ is a regular expression. Calls are written with the names of the module of tests that plays the table, and
with what the table's own lines of imports bring; lines that begin with # are comments.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.fixtures import getfixturemarker

from moretta.errors import MorettaError

FOLDER = Path(__file__).parent / "refusals"


def lines(name: str) -> list[list[str]]:
    """Return the rows of a table, each as its parts."""
    text = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line.split(" => ") for line in text if line and not line.startswith("#")]


def same(expected: str, said: str, *, whole: bool = True) -> bool:
    """Return whether a sentence is as expected, where three dots stand for anything."""
    pattern = expected[1:] if expected.startswith("~") else re.escape(expected).replace(re.escape("..."), ".*")
    return bool((re.fullmatch if whole else re.search)(pattern, said))


@dataclass(frozen=True)
class Row:
    """One call that is refused. imports: what its table takes from elsewhere, a line each."""

    imports: tuple[str, ...]
    call: str
    refusal: str

    def imported(self) -> dict[str, Any]:
        """Import what the table needs beside the names of the tests' own module."""
        places = [line.removeprefix("from ").split(" import ") for line in self.imports]
        return {name: getattr(import_module(home), name) for home, names in places for name in names.split(", ")}

    def play(self, names: Mapping[str, Any], request: pytest.FixtureRequest | None = None) -> None:
        """Call with these names, and with the fixtures of others, and look at the error; one of ours is one line."""
        own = {name: value for name, value in names.items() if getfixturemarker(value) is None}
        known = {**vars(builtins), **own, **self.imported()}
        if request is not None:
            known |= {name: request.getfixturevalue(name) for name in free(self.call) - {*known}}
        error, _, sentence = self.refusal.partition(": ")
        with pytest.raises(eval(error, known)) as caught:
            eval(self.call, known)
        said = str(caught.value)
        assert same(sentence, said, whole=False), said
        assert said.isprintable() or not isinstance(caught.value, MorettaError)


def free(call: str) -> set[str]:
    """Return the names that a call takes from where it stands."""
    names = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name | ast.arg)]
    bound = {node.arg if isinstance(node, ast.arg) else node.id for node in names if not used(node)}
    return {node.id for node in names if isinstance(node, ast.Name)} - bound


def used(node: ast.Name | ast.arg) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def refused(name: str) -> pytest.MarkDecorator:
    """Play each row of a table."""
    table = lines(name)
    imports = tuple(parts[0] for parts in table if len(parts) == 1)
    rows = [Row(imports, *parts) for parts in table if len(parts) == 2]
    return pytest.mark.parametrize("row", rows, ids=[row.call for row in rows])
