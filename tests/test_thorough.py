"""The list of what only `make test-all` runs."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAMILIES = tomllib.loads((HERE / "thorough.toml").read_text())["family"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_to_make_test_all_is_there_and_says_why(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((HERE.parent / file).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert set(FAMILIES[name]) == {"keep", "seconds", "why"}
    assert FAMILIES[name]["keep"] >= 0
    assert FAMILIES[name]["why"]
